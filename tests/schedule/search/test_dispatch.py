from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from penstock.schedule.check import check
from penstock.schedule.memory import Budget
from penstock.schedule.search.annealing import time_order
from penstock.schedule.search.dispatch import Dispatcher
from penstock.schedule.search.patterns import PatternMaker
from tests.support.orders import PLACEMENTS, small_problem

LEAST = {"loop": 1, "loop of 2": 2, "v": 2, "two pipes": 1}


@pytest.mark.parametrize("backward", ["full", "split"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_pattern_is_ever_stuck_however_small_the_memory(name: str, backward: str):
    for limit in (LEAST[name], LEAST[name] + 1, LEAST[name] + 3):
        problem = small_problem(PLACEMENTS[name], 6, backward, limit)
        dispatcher, maker = Dispatcher(problem, 1), PatternMaker(problem)
        for pattern in islice(maker.draw(np.random.default_rng(limit)), 30):
            makespan, codes = dispatcher.build(maker.rule(pattern))
            schedule = problem.schedule(codes, "dispatched")
            check(schedule, budget=Budget(limit))
            # The rank may have waited where the order alone would not.
            assert time_order(problem.tables, codes, max(problem.counts))[0] <= makespan < np.inf


def test_a_pattern_with_room_is_1f1b():
    problem = small_problem(PLACEMENTS["loop"], 8, "full", 3)
    maker = PatternMaker(problem)
    _, codes = Dispatcher(problem, 1).build(maker.rule(next(maker.draw(np.random.default_rng(0)))))
    assert problem.schedule(codes, "dispatched").text(2).startswith("2F0 2B0 2F1 2B1 2F2 2B2")


def test_patterns_differ_and_vary():
    problem = small_problem(PLACEMENTS["v"], 6)
    maker, random = PatternMaker(problem), np.random.default_rng(1)
    drawn = list(islice(maker.draw(random), 40))
    assert len(set(drawn)) == 40
    assert len({maker.vary(drawn[20], random) for _ in range(20)}) > 10
