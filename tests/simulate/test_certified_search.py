from __future__ import annotations

import numpy as np
import pytest
from bench.proved_orders import PROVED, Proved

from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES
from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.simulate.certified_search import order_problem, search_schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan
from tests.support.lanes import exhaustive, slow
from tests.support.orders import stage_costs

QUICK = [case for case in PROVED if case.p * case.m <= 48 and case.latency in (1, 2)]


@pytest.mark.parametrize(
    ("case", "within"),
    [
        *((case, 1.05) for case in QUICK[:3]),
        *slow(*((case, 1.05) for case in QUICK[3:])),
        *exhaustive(*((case, 1.03) for case in PROVED)),
    ],
    ids=lambda value: value.name if isinstance(value, Proved) else str(value),
)
def test_proved_optima_are_reached(case: Proved, within: float):
    """Search until the makespan is within a factor of the optimum, or the time is over."""

    def end(_: int, best: float) -> None:
        if best <= within * case.makespan:
            raise KeyboardInterrupt

    found = search_schedule(
        case.placed, case.m, case.table, case.backward, case.budget, seconds=60.0, progress=end
    )
    program = check(found.schedule, budget=case.budget).program
    assert makespan(simulate(program, case.table)) == found.makespan >= case.makespan >= found.lower_bound
    assert (found.peak == case.budget.peak(found.schedule)).all()
    assert found.makespan <= within * case.makespan


# split backwards on a V, and two pipes
@pytest.mark.parametrize(
    ("family", "limit"), [("zb-v", 8), ("chimera", 4), *exhaustive(("v-half", 6), ("interleaved-1f1b", 11))]
)
def test_it_is_never_slower_than_the_catalogue(family: str, limit: int):
    schedule = FAMILIES[family].build(4, 8)
    costs = stage_costs(schedule.placement, 3, 5, 2, latency=1)
    backward = "split" if FAMILIES[family].splits_backward else "full"
    found = search_schedule(schedule.placement, 8, costs, backward, Budget(limit), seconds=0.3)
    assert found.makespan <= makespan(simulate(check(schedule, budget=Budget(limit)).program, costs))


def test_pairs_that_overlap_their_halves_stay_pairs():
    placement = Placement.waves(3)
    each = [2] * 6
    costs = Costs.of(placement, each, each, each, pair=[4] * 6)
    theirs = simulate(check(FAMILIES["dualpipe-v"].build(3, 20)).program, costs)
    found = search_schedule(placement, 20, costs, "split", seconds=0.2)
    assert found.makespan <= makespan(theirs)
    assert found.gap >= 0


def test_the_same_seed_finds_the_same_order():
    costs = Costs.of(Placement.loop(3), 3, 4, 2)
    found = [
        search_schedule(Placement.loop(3), 4, costs, "split", Budget(3), seconds=60, seed=5) for _ in range(2)
    ]
    assert found[0].schedule == found[1].schedule
    assert found[0].ended == found[1].ended != "time"


def test_whole_backwards_are_used_where_they_take_less_than_their_halves():
    placement = Placement.loop(3)
    costs = stage_costs(placement, 3, 4, 4, full=6)
    found = search_schedule(placement, 6, costs, "split", seconds=0.2)
    kinds = set(np.unique(found.schedule.kind).tolist())
    assert Kind.B in kinds
    assert found.makespan <= search_schedule(placement, 6, costs, "full", seconds=0.2).makespan


@pytest.mark.parametrize(
    ("full", "mixed"), [([6, 6], False), ([5, 6], True), ([6, 5], True), ([7, 7], False)]
)
def test_orders_mix_backwards_only_where_a_whole_one_takes_less_than_its_halves(full: list[int], mixed: bool):
    placement = Placement.loop(2)
    costs = Costs.of(placement, 1, [4, 4], [2, 2])
    costs.seconds[:, Kind.B] = full
    assert order_problem(placement, 4, costs, "split").mixed == mixed
    assert not order_problem(placement, 4, costs, "full").mixed


def test_bytes_of_each_stage_and_of_the_gradients_that_wait_are_kept_within_the_limit():
    placement = Placement.waves(3)
    budget = Budget(900, [100, 120, 90, 150, 110, 200], [10, 0, 30, 0, 0, 50])
    found = search_schedule(placement, 8, stage_costs(placement, 3, 4, 2), "split", budget, seconds=0.2)
    check(found.schedule, budget=budget)
    assert 450 < found.peak.max() <= 900


def test_one_rank_and_one_microbatch():
    costs = Costs.of(Placement.loop(1), 1, 1, 1)
    assert search_schedule(Placement.loop(1), 3, costs, "split", Budget(1)).makespan == 9
    assert search_schedule(Placement.loop(4), 1, Costs.of(Placement.loop(4), 1, 1, 1)).makespan == 12
    assert search_schedule(Placement.two_way(2), 1, Costs.of(Placement.two_way(2), 1, 1, 1)).makespan == 6
