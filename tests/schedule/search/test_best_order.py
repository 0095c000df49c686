from __future__ import annotations

import numpy as np
import pytest

from penstock.schedule import jit
from penstock.schedule.check import check
from penstock.schedule.families.starts import catalogue_starts
from penstock.schedule.memory import Budget
from penstock.schedule.placement import Placement
from penstock.schedule.search.annealing import Heat, anneal, time_order
from penstock.schedule.search.best_order import OrderSearch
from penstock.schedule.search.patterns import repeating_orders
from tests.support.orders import PLACEMENTS, small_problem


@pytest.mark.parametrize("backward", ["full", "split"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_annealing_returns_a_valid_order_in_the_memory_with_its_makespan(name: str, backward: str):
    problem = small_problem(PLACEMENTS[name], 6, backward, 4)
    most, alone = max(problem.counts), problem.one_by_one()
    for seed in range(3):
        makespan, codes = anneal(problem.tables, alone, most, Heat(20_000, 2.0, 0.1, 3.0, 8, seed, 0.0))
        check(problem.schedule(codes, "annealed"), budget=Budget(4))
        assert time_order(problem.tables, codes, most)[0] == makespan
        assert makespan < time_order(problem.tables, alone, most)[0]


@pytest.mark.filterwarnings("ignore:.*without numba")
def test_annealing_without_numba_gives_the_same_order(monkeypatch: pytest.MonkeyPatch):
    problem = small_problem(PLACEMENTS["v"], 6, "split", 4)
    most, alone = max(problem.counts), problem.one_by_one()
    heat = Heat(1_000, 2.0, 0.1, 3.0, 8, 3, 0.0)
    compiled = anneal(problem.tables, alone, most, heat)
    monkeypatch.setattr(jit, "find_spec", lambda name: None)
    plain = anneal(problem.tables, alone, most, heat)  # an overflow in numpy would be an error
    assert plain[0] == compiled[0]
    assert plain[1].tolist() == compiled[1].tolist()


def test_annealing_may_begin_beyond_the_memory():
    loose = small_problem(PLACEMENTS["v"], 6, "split", 12)
    tight = small_problem(PLACEMENTS["v"], 6, "split", 4)
    wide = OrderSearch(loose, catalogue_starts).run(0.1).codes
    makespan, codes = anneal(tight.tables, wide, 6, Heat(100_000, 2.0, 0.1, 3.0, 8, 0, 0.0))
    assert makespan < np.inf
    check(tight.schedule(codes, "annealed"), budget=Budget(4))


def test_a_search_ends_at_the_bound():
    problem = small_problem(Placement.loop(3), 6, "full", 3)
    first = OrderSearch(problem, catalogue_starts).run(0.2)
    found = OrderSearch(problem, catalogue_starts, bound=first.makespan).run(60)
    assert (found.ended, found.makespan) == ("proved", first.makespan)


def test_control_c_returns_the_best_so_far():
    problem = small_problem(PLACEMENTS["v"], 6, "split", 4)

    def interrupt(rounds: int, makespan: float) -> None:
        if rounds == 2:
            raise KeyboardInterrupt

    found = OrderSearch(problem, catalogue_starts, progress=interrupt).run(60)
    assert (found.ended, found.rounds) == ("interrupted", 2)
    check(problem.schedule(found.codes, "interrupted"), budget=Budget(4))


@pytest.mark.slow
def test_patterns_repeat_to_any_number_of_microbatches():
    problem = small_problem(PLACEMENTS["v"], 60, "split", 4)
    alone = time_order(problem.tables, problem.one_by_one(), 60)[0]
    orders = list(repeating_orders(problem, 0.5, 0))
    assert orders
    for makespan, codes in orders:
        check(problem.schedule(codes, "repeating"), budget=Budget(4))
        assert makespan < 0.7 * alone
