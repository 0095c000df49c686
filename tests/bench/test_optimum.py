from __future__ import annotations

import pytest

from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.simulate.bounds import lower_bound
from tests.support.simulated import priced, timed

pytest.importorskip("ortools")
from bench.optimum import Optimum, optimum

pytestmark = pytest.mark.slow


def best(family: str, p: int, m: int, limit: int, *mix: int, **options: object) -> Optimum:
    program = check(build_schedule(family, p, m, **options)).program
    return optimum(program.schedule, priced(program, *mix), timed(program, *mix), limit)


def test_memory_decides_what_can_be_reached():
    # One activation: a microbatch is through with a rank before the next comes, five ops each on the first.
    assert best("zb-auto", 2, 2, 1, 1, 1, 1, memory_limit=1) == Optimum(10, 10)
    assert best("zb-h1", 2, 2, 2, 1, 1, 1) == Optimum(7, 7)


def test_the_optimum_is_the_bound_where_the_bound_is_known_to_be_tight():
    program = check(build_schedule("zb-h2", 3, 6)).program
    bound = lower_bound(program.schedule.placement, 6, priced(program, 2, 2, 2), "split").makespan
    assert best("zb-h2", 3, 6, 6, 2, 2, 2) == Optimum(bound, bound)


def test_a_handcrafted_order_can_be_beaten_where_weights_are_long():
    found = best("zb-h1", 4, 8, 4, 10, 9, 13, 1)
    program = check(build_schedule("zb-h1", 4, 8)).program
    theirs = int(timed(program, 10, 9, 13, 1).end.max())
    assert found.makespan == found.proved < theirs
