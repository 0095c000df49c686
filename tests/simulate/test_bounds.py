from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from bench.proved_orders import PROVED, Proved
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ConfigError, ScheduleError
from penstock.schedule.families import FAMILIES
from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.simulate.bounds import bound_in_memory, bound_of, lower_bound
from penstock.simulate.costs import Communication, Costs, Link
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan
from tests.support.lanes import slow
from tests.support.simulated import built, priced, timed, written

GRID = [(2, 2, 0), (2, 6, 2), (3, 3, 2), (4, 8, 0), (4, 12, 2), (6, 6, 2)]


def talk(latency: int) -> Communication:
    return Communication(same_node=Link(latency))


@pytest.mark.parametrize(("p", "m", "c"), GRID)
def test_with_one_stage_a_rank_it_is_the_closed_form(p: int, m: int, c: int):
    f, b, w = 10, 12, 6
    costs = Costs.of(Placement.loop(p), f, b, w, communication=talk(c))
    assert lower_bound(Placement.loop(p), m, costs, "full").makespan == m * 28 + (p - 1) * (28 + 2 * c)
    split = max(m * 28 + (p - 1) * (f + c), (p - 1) * (f + b + 2 * c) + m * (f + b) + w)
    assert lower_bound(Placement.loop(p), m, costs, "split").makespan == split


@pytest.mark.parametrize(("p", "m", "c"), GRID)
def test_looped_stages_bring_the_pipe_closer(p: int, m: int, c: int):
    costs = Costs.of(Placement.loop(p, 2), 20, 24, 12, communication=talk(c))
    bound = lower_bound(Placement.loop(p, 2), m, costs, "full")
    # As many microbatches as ranks leave no slack in which the latency of the later rounds could hide.
    hops = 2 * p - 1 if m == p else p - 1
    assert bound.makespan == m * 56 + (p - 1) * 28 + 2 * hops * c
    assert bound.critical_path == 2 * p * 28 + 2 * (2 * p - 1) * c


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 9), (5, 10)])
def test_a_v_placement_needs_the_way_down_besides_its_work(p: int, m: int):
    costs = Costs.of(Placement.waves(p), 2, 2, 2)
    assert lower_bound(Placement.waves(p), m, costs, "split").makespan == 6 * m + p - 1


@pytest.mark.parametrize(("p", "m", "c"), GRID)
def test_schedules_attain_it(p: int, m: int, c: int):
    """1F1B without latency, GPipe with any, interleaved without, and with any if there are p microbatches."""
    for family, latency in (("1f1b", 0), ("gpipe", c), ("interleaved-1f1b", c if m == p else 0)):
        program = built(family, p, m)
        costs = priced(program, 20, 24, 12, latency)
        assert makespan(simulate(program, costs)) == bound_of(program.schedule, costs).makespan


costs_of_a_stage = st.integers(0, 30)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_schedule_is_faster(data: st.DataObject):
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    p = data.draw(st.sampled_from([2, 4]))
    program = built(family, p, data.draw(st.sampled_from([2 * p, 3 * p])))
    stages = program.schedule.stages
    f, b, w, full = (
        data.draw(st.lists(costs_of_a_stage, min_size=stages, max_size=stages)) for _ in range(4)
    )
    link = Link(data.draw(st.integers(0, 9)))
    blocks = data.draw(st.sampled_from(["none", "sender", "receiver", "both"]))
    costs = Costs.of(
        program.schedule.placement, f, b, w, full=full,
        communication=Communication(same_node=link, other_node=Link(20), ranks_per_node=2, blocks=blocks),
    )  # fmt: skip
    trace = simulate(program, costs)
    bound = bound_of(program.schedule, costs)
    assert bound.makespan <= makespan(trace)
    assert bound.makespan == max(bound.critical_path, bound.machine.max())


def test_no_order_of_all_is_faster_and_one_attains_it():
    """Every order of one stage's split ops on one rank, and every interleaving on two."""
    orders = []
    for ops in itertools.permutations(["F0", "I0", "W0", "F1", "I1", "W1"]):
        place = {op: n for n, op in enumerate(ops)}
        if (
            all(place[f"F{j}"] < place[f"I{j}"] < place[f"W{j}"] for j in (0, 1))
            and place["F0"] < place["F1"]
        ):
            orders.append(ops)
    found = []
    for both in itertools.product(orders, repeat=2):
        lines = [" ".join(f"{stage}{op}" for op in ops) for stage, ops in enumerate(both)]
        with suppress(ScheduleError):
            found.append(makespan(timed(written(Placement.loop(2), 2, *lines), 2, 3, 5, 1)))
    costs = Costs.of(Placement.loop(2), 2, 3, 5, communication=talk(1))
    assert min(found) == lower_bound(Placement.loop(2), 2, costs, "split").makespan


def test_the_work_of_copies_is_shared():
    two = Placement.two_way(2)
    program = written(two, 2, "0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1")
    costs = priced(program, 1, 1, 1)
    bound = lower_bound(two, 2, costs)
    assert bound.machine.tolist() == [6, 6]
    assert bound.critical_path == 6
    assert makespan(simulate(program, costs)) == 6
    assert lower_bound(two, 3, costs).machine.tolist() == [9, 9]
    # The forwards and backwards of stage 3, by two ranks; the backwards of 1 and 2.
    four = Placement.two_way(4)
    outer, inner = 3 * 2 + 3 * (2 + 4) // 2 + 3 * 4, 4 * 2 + 4 + 3 * (4 + 4) // 2 + 4
    assert lower_bound(four, 3, Costs.of(four, 2, 2, 2)).machine.tolist() == [outer, inner, inner, outer]


def test_pairs_that_save_time_lower_it():
    program = written(Placement.loop(1), 3, "0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2")
    costs = priced(program, 2, 2, 2, pair=5)
    assert makespan(simulate(program, costs)) == 16
    assert lower_bound(Placement.loop(1), 3, costs).makespan == 15


def test_forwards_alone_have_no_way_back():
    costs = Costs.of(Placement.loop(3), 2, 2, 2, communication=talk(1))
    bound = lower_bound(Placement.loop(3), 4, costs, "none")
    assert (bound.makespan, bound.critical_path) == (4 * 2 + 2 * 3, 3 * 2 + 2)


def test_the_kind_of_backward_is_read_from_the_schedule():
    costs = Costs.of(Placement.loop(1), 2, 3, 4, full=9)
    whole = written(Placement.loop(1), 1, "0F0 0B0").schedule
    split = written(Placement.loop(1), 1, "0F0 0I0 0W0").schedule
    assert bound_of(whole, costs).makespan == 11
    assert bound_of(split, costs).makespan == 9
    assert np.isin([Kind.I, Kind.W], split.kind).all()


def test_a_latency_with_a_fraction_counts_in_full_beside_whole_seconds():
    placement = Placement.loop(4)
    link = Link(0.75)
    costs = Costs.of(placement, 1, 1, 1, communication=Communication(same_node=link, other_node=link))
    bound = lower_bound(placement, 6, costs, "full")
    assert bound.machine[3] == 6 * 3 + 3 * (3 + 2 * 0.75)
    huge = replace(costs, communication=Communication(same_node=Link(4 * 10**18)))
    with pytest.raises(ConfigError, match="take more than"):
        lower_bound(placement, 6, huge)


KINDS = {(case.placement, case.backward): case for case in PROVED}


# one of each placement and kind of backward
@pytest.mark.parametrize(
    "case",
    [*KINDS.values(), *slow(*((case,) for case in PROVED if case not in KINDS.values()))],
    ids=lambda case: case.name,
)
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
@settings(max_examples=40, deadline=None)
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
