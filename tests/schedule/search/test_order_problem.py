from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from penstock.base.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES
from penstock.schedule.families.starts import STARTS
from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.search.annealing import time_order
from penstock.schedule.search.order_problem import WHOLE, BackwardMode, OrderProblem, joined, numbers
from penstock.simulate.certified_search import order_problem
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan
from tests.support.orders import PLACEMENTS, small_problem, stage_costs


@pytest.mark.parametrize("blocks", ["none", "sender", "receiver", "both"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_an_order_takes_as_long_as_its_schedule_is_simulated_to_take(name: str, blocks: str):
    placement = PLACEMENTS[name]
    costs = stage_costs(placement, 3, 5, 2, latency=2, blocks=blocks)
    for backward in ("full", "split"):
        problem = small_problem(placement, 5, backward, costs=costs)
        codes = problem.one_by_one()
        schedule = problem.schedule(codes, "alone")
        trace = simulate(check(schedule).program, costs)
        timed = time_order(problem.tables, codes, max(problem.counts))[0]
        # A message that blocks its sender after the last op of all is not a part of the simulated makespan.
        assert timed == makespan(trace)


@pytest.mark.parametrize("family", STARTS)
def test_a_family_keeps_its_order(family: str):
    schedule = FAMILIES[family].build(4, 6)
    costs = stage_costs(schedule.placement, 3, 5, 2, latency=1)
    backward = "split" if FAMILIES[family].splits_backward else "full"
    problem = order_problem(schedule.placement, 6, costs, backward)
    again = problem.schedule(problem.codes(schedule), family)
    if not schedule.paired.any() and not schedule.placement.has_copies:
        assert again == schedule
    took = makespan(simulate(check(again).program, costs))
    assert took <= makespan(simulate(check(schedule).program, costs))
    assert (Budget(0).peak(again) <= Budget(0).peak(schedule)).all()


def test_all_families_but_the_searches_are_starts():
    assert {name for name, family in FAMILIES.items() if not family.searches} == set(STARTS)


def test_halves_that_follow_each_other_become_one_backward():
    problem = order_problem(Placement.loop(2), 3, stage_costs(Placement.loop(2), 3, 4, 3, full=5), "split")
    assert problem.mixed
    codes = joined(problem, problem.one_by_one())
    assert np.count_nonzero(codes % 4 == WHOLE) == 6
    schedule = problem.schedule(codes, "joined")
    assert schedule.text(0) == "0F0 0B0 0F1 0B1 0F2 0B2"
    assert problem.codes(schedule).tolist() == codes.tolist()
    check(schedule)


def test_a_weight_half_counts_past_whole_backwards():
    # F0 F1 F2, B0, I1, F3, B... W1: the W is of microbatch 1, which the B before it has left to it.
    codes = np.array([0, 0, 3, 1, 2, 0, 1, 2])
    assert numbers(codes).tolist() == [0, 1, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(("name", "least"), [("loop", 1), ("loop of 2", 2), ("v", 2), ("two pipes", 1)])
def test_a_limit_below_one_microbatch_is_refused_with_the_least(name: str, least: int):
    small_problem(PLACEMENTS[name], 3, limit=least).require_possible()
    with pytest.raises(ScheduleError, match=f"takes {least} on rank 0, so {least} is the least"):
        small_problem(PLACEMENTS[name], 3, limit=least - 1).require_possible()


def test_copies_other_than_two_opposite_pipes_are_refused():
    copies = Placement(2, ((0, 1), (1,)))
    with pytest.raises(ScheduleError, match="two pipes in opposite directions"):
        order_problem(copies, 2, stage_costs(copies, 1, 1, 1), "full")


def test_the_pipes_share_the_microbatches():
    for m, (down, up) in itertools.product([5, 6], [(3, 2), (3, 3)]):
        if down + up == m:
            assert small_problem(Placement.two_way(4), m).counts == (down, up)


@pytest.mark.parametrize("backward", ["full", "split"])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_two_pipes_is_the_least_of_all_assignments(backward: BackwardMode, seed: int):
    random = np.random.default_rng(seed)
    for microbatches in (1, 2, 3, 8, 13):
        placement = Placement.two_way(4)
        seconds = random.integers(1, 9, (4, len(Kind))).astype(float)
        travel = random.integers(0, 20, (2, 3)) * random.integers(0, 2, (2, 3)).astype(float)
        problem = OrderProblem(
            placement=placement,
            microbatches=microbatches,
            backward=backward,
            seconds=seconds,
            travel=travel,
            mixed=bool(seed % 2) and backward == "split",
        )
        each = [replace(problem, in_first=first).least for first in range(microbatches + 1)]
        assert problem.least_of_all == min(each)
        for assigned in problem.assignments:
            assert sum(assigned.counts) == microbatches
            alone = assigned.one_by_one()
            assert (
                assigned.least <= time_order(assigned.tables_of(alone), alone, max(assigned.counts))[0] + 1e-9
            )
