from __future__ import annotations

import pytest
from bench.proved_orders import PROVED, Proved
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.families import FAMILIES
from penstock.schedule.memory import Budget
from penstock.schedule.placement import Placement
from penstock.simulate.bounds import bound_in_memory, lower_bound
from penstock.simulate.costs import Costs
from penstock.trace.bubbles import makespan
from tests.support.simulated import built, timed


@pytest.mark.parametrize("case", PROVED, ids=lambda case: case.name)
def test_it_never_exceeds_a_proved_optimum(case: Proved):
    bound = bound_in_memory(case.placed, case.m, case.table, case.backward, case.budget)
    assert bound <= case.makespan
    assert bound >= lower_bound(case.placed, case.m, case.table, case.backward).makespan


def test_a_chain_of_microbatches_is_all_that_one_activation_allows():
    # One after the other: the first rank has each for F, then the second rank's F and B, then its B.
    costs = Costs.of(Placement.loop(2), 2, 3, 1)
    assert bound_in_memory(Placement.loop(2), 5, costs, "full", Budget(1)) == 5 * 12
    assert lower_bound(Placement.loop(2), 5, costs, "full").makespan == 5 * 6 + 6


def test_bytes_count_by_stage():
    costs = Costs.of(Placement.loop(2), 2, 3, 1)
    limits = Budget([300, 10**9], [100, 7])
    assert bound_in_memory(Placement.loop(2), 30, costs, "full", limits) >= 30 * 12 / 3
    assert bound_in_memory(Placement.loop(2), 30, costs, "full", Budget(10**9, [100, 7])) == 30 * 6 + 6


@given(
    st.sampled_from([name for name, family in FAMILIES.items() if not family.searches]),
    st.integers(1, 3).map(lambda n: 2 * n),
    st.integers(1, 9),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_no_schedule_beats_it_in_its_own_memory(
    family: str, p: int, m: int, costs: tuple[int, int, int], latency: int
):
    program = built(family, p, m)
    schedule = program.schedule
    table = Costs.of(schedule.placement, *costs)
    took = makespan(timed(program, *costs, latency))
    backward = "split" if FAMILIES[family].splits_backward else "full"
    held = Budget(Budget(0).peak(schedule))
    assert bound_in_memory(schedule.placement, m, table, backward, held) <= took
