from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from penstock.schedule.check import check
from penstock.schedule.memory import Budget, FreedAt
from penstock.schedule.search.annealing import time_order
from penstock.schedule.search.dispatch import Dispatcher
from penstock.schedule.search.patterns import PatternMaker
from penstock.simulate.certified_search import order_problem
from tests.support.lanes import exhaustive
from tests.support.orders import PLACEMENTS, small_problem, stage_costs

LEAST = {"loop": 1, "loop of 2": 2, "v": 2, "two pipes": 1}


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["split", *exhaustive("full")])
@pytest.mark.parametrize("name", ["v", "two pipes", *exhaustive("loop", "loop of 2")])
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


@pytest.mark.slow
@pytest.mark.parametrize("freed_at", ["B", *exhaustive("W")])
@pytest.mark.parametrize("name", ["v", *exhaustive("two pipes", "loop", "loop of 2")])
def test_gradients_that_wait_for_their_weight_halves_keep_the_limit(name: str, freed_at: FreedAt):
    placement, random = PLACEMENTS[name], np.random.default_rng(3)
    for _ in range(12):
        saved, waiting = (random.integers(low, 30, placement.stages) for low in (1, 0))
        budget = Budget(2**40, saved, waiting, freed_at=freed_at)
        free = order_problem(placement, 6, stage_costs(placement, 3, 4, 2, latency=1), "split", budget)
        least = budget.least(free.schedule(free.one_by_one(), "one by one"))
        problem = replace(free, budget=replace(budget, limit=least + random.integers(0, 20, placement.ranks)))
        dispatcher, maker = Dispatcher(problem, 1), PatternMaker(problem)
        for pattern in islice(maker.draw(random), 10):
            makespan, codes = dispatcher.build(maker.rule(pattern))
            assert makespan < np.inf
            check(problem.schedule(codes, "dispatched"), budget=problem.budget)


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
