from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.ops import Kind, Op
from penstock.schedule.placement import Placement
from penstock.schedule.program import JITTER_SLOTS, Action, Edge, Program, lower
from penstock.schedule.schedule import Schedule
from tests.support.lanes import exhaustive
from tests.support.schedule_oracle import lists, runs_when_sends_block
from tests.support.schedules import schedules, written

TWO = Placement.loop(2)
FIRST = ("1f1b", "interleaved-1f1b", "zb-v", "dualpipe", "hanayo")
FEW = [*FIRST, *exhaustive(*(name for name in FAMILIES if name not in (*FIRST, "gpipe")))]
"""Whole backwards, stages on a loop, split backwards on a V, copies with pairs, waves."""


def with_slots(program: Program, slots: Callable[[Edge], int]) -> Program:
    """The program with another number of receives posted ahead on each edge."""
    other = lower(program.schedule)
    other.__dict__["edges"] = {key: replace(edge, slots=slots(edge)) for key, edge in program.edges.items()}
    return other


def needed(edge: Edge) -> int:
    """The slots of the proof: those for jitter are there only if the edge has as many messages."""
    return edge.slots - JITTER_SLOTS if edge.slots < len(edge.consumers) else edge.slots


def test_one_ranks_part_is_spelled_out():
    program = lower(build_schedule("1f1b", 2, 2))
    assert [program.describe(i) for i in program.instructions(0)] == [
        "post #0 for 0B0 from rank 1", "post #1 for 0B1 from rank 1",
        "run 0F0", "send #0 of 0F0 to rank 1", "run 0F1", "send #1 of 0F1 to rank 1",
        "recv #0 for 0B0 from rank 1", "run 0B0", "free 0B0",
        "recv #1 for 0B1 from rank 1", "run 0B1", "free 0B1", "reduce stage 0 after 0B1",
    ]  # fmt: skip


def test_stages_of_one_rank_hand_over_and_pairs_run_at_once():
    program = lower(written(Placement.waves(1), 2, "0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1I1 0I1 0W1 1W1"))
    assert [program.describe(i) for i in program.instructions(0)] == [
        "run 0F0", "hand 0F0", "take 1F0", "run 1F0", "run 0F1", "hand 0F1", "run 1B0", "hand 1B0", "free 1B0",
        "take 1F1", "take 0B0", "run (1F1;0B0)OVERLAP_F_B", "free 0B0", "run 1I1", "hand 1I1", "take 0I1",
        "run 0I1", "run 0W1", "free 0W1", "reduce stage 0 after 0W1", "run 1W1", "free 1W1",
        "reduce stage 1 after 1W1",
    ]  # fmt: skip


@given(schedules(ranks=6, microbatches=8, virtual_stages=3))
@settings(deadline=None, derandomize=True, max_examples=20)
def test_every_op_runs_once_and_every_message_is_posted_sent_and_received_once(schedule: Schedule):
    program = check(schedule).program
    ran, messages = Counter(), Counter()
    for rank in range(schedule.ranks):
        posted = set()
        for i in program.instructions(rank):
            match i.action:
                case Action.RUN:
                    ran.update(range(i.row, i.row + i.number))
                case Action.SEND:
                    messages["send", rank, i.peer, i.number] += 1
                    assert program.edges[rank, i.peer].consumers[i.number] == program.target[i.row]
                case Action.POST:
                    posted.add((i.peer, i.number))
                    messages["post", i.peer, rank, i.number] += 1
                case Action.RECV:
                    assert (i.peer, i.number) in posted
                    messages["recv", i.peer, rank, i.number] += 1
    assert ran == Counter(range(len(schedule)))
    wanted = {
        (what, *key, n) for key, edge in program.edges.items() for n in range(len(edge.consumers))
        for what in ("post", "send", "recv")
    }  # fmt: skip
    assert messages == Counter(wanted)


@given(schedules(ranks=8, microbatches=10, virtual_stages=3))
@settings(deadline=None, derandomize=True, max_examples=20)
def test_programs_end_even_if_sends_and_reductions_block(schedule: Schedule):
    program = check(schedule).program
    assert runs_when_sends_block(program)
    assert runs_when_sends_block(with_slots(program, needed))


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_without_posted_receives_blocking_sends_deadlock(name: str):
    program = check(build_schedule(name, 4, 8)).program
    assert not runs_when_sends_block(with_slots(program, lambda edge: 0))


@given(schedules(ranks=4, microbatches=5, virtual_stages=2), st.data())
@settings(deadline=None, derandomize=True, max_examples=40)
def test_an_order_with_a_cycle_stops_for_real_and_one_without_does_not(schedule: Schedule, data):
    ops = lists(schedule)
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    a, b = (data.draw(st.integers(0, len(ops[rank]) - 1)) for _ in range(2))
    ops[rank][a], ops[rank][b] = ops[rank][b], ops[rank][a]
    swapped = Schedule.from_ops("swapped", schedule.placement, schedule.microbatches, ops)
    try:
        program = check(swapped).program
    except ScheduleError as error:
        if "deadlocks" in str(error):
            assert not runs_when_sends_block(lower(swapped))
    else:
        assert runs_when_sends_block(program)


@given(schedules(ranks=8, microbatches=9, virtual_stages=3))
@settings(deadline=None, derandomize=True, max_examples=20)
def test_every_holder_reduces_every_stage_once_after_its_own_gradients(schedule: Schedule):
    program = check(schedule).program
    orders = {}
    for rank in range(schedule.ranks):
        rows = {}
        for i in program.instructions(rank):
            if i.action is Action.REDUCE:
                assert i.number not in rows
                rows[i.number] = i.row
        assert set(rows) == set(schedule.placement.stages_of[rank])
        orders[rank] = list(rows)
        for row in range(*schedule.rows(rank).indices(len(schedule))):
            if schedule.kind[row] in (Kind.B, Kind.W):
                assert row <= rows[int(schedule.stage[row])]
    for stage, ranks in program.reductions.items():
        assert ranks == schedule.placement.holders[stage]
        for other, others in program.reductions.items():
            if set(ranks) == set(others):
                firsts = {orders[r].index(stage) < orders[r].index(other) for r in ranks}
                assert len(firsts) == 1


def test_a_copy_that_saw_no_microbatch_is_reduced_too():
    program = check(build_schedule("chimera", 4, 1)).program
    assert program.reductions == {0: (0, 3), 1: (1, 2), 2: (2, 1), 3: (3, 0)}
    for rank in range(4):
        reduced = [i.number for i in program.instructions(rank) if i.action is Action.REDUCE]
        assert sorted(reduced) == sorted([rank, 3 - rank])


def test_a_stage_without_copies_is_reduced_right_after_its_last_gradient():
    for name in ("1f1b", "interleaved-1f1b", "zb-h2", "dualpipe-v"):
        schedule = build_schedule(name, 3, 6)
        program = check(schedule).program
        for rank in range(3):
            for i in program.instructions(rank):
                if i.action is Action.REDUCE:
                    assert i.row == program.last_gradient_rows[rank, i.number]


def test_an_op_that_can_never_run_has_level_0():
    program = lower(written(TWO, 2, "0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    assert program.level.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", FEW)
def test_levels_are_an_order_that_respects_every_wait(name: str):
    schedule = build_schedule(name, 4, 9)
    program = lower(schedule)
    takers = program.source >= 0
    assert (program.level[takers] > program.level[program.source[takers]]).all()
    for rank in range(4):
        rows = schedule.rows(rank)
        step = program.level[rows][1:] - program.level[rows][:-1]
        assert (step >= 1 - schedule.paired[rows][:-1]).all()


def test_a_skip_has_a_port_of_its_own_there_and_back():
    program = replace(lower(build_schedule("1f1b", 3, 1)), skips=((0, 2),))
    assert [program.describe(i) for i in program.instructions(0)] == [
        "post #0 for 0B0 from rank 1", "post #0 for 0B0 (skip 1) from rank 2",
        "run 0F0", "send #0 of 0F0 to rank 1", "send #0 of 0F0 (skip 1) to rank 2",
        "recv #0 for 0B0 from rank 1", "recv #0 for 0B0 (skip 1) from rank 2",
        "run 0B0", "free 0B0", "reduce stage 0 after 0B0",
    ]  # fmt: skip
    assert [program.describe(i) for i in program.instructions(2)][2:] == [
        "recv #0 for 2F0 from rank 1", "recv #0 for 2F0 (skip 1) from rank 0",
        "run 2F0", "run 2B0", "send #0 of 2B0 to rank 1", "send #0 of 2B0 (skip 1) to rank 0",
        "free 2B0", "reduce stage 2 after 2B0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ranks", "capacities"),
    [
        # As many as forwards lead the backwards by, on the rank of the two where they lead by more.
        ("1f1b", 4, {(0, 1): 4, (1, 0): 4, (1, 2): 3, (2, 1): 3, (2, 3): 2, (3, 2): 2}),
        ("gpipe", 2, {(0, 1): 8, (1, 0): 8}),
        ("zb-h1", 3, {(0, 1): 3, (1, 0): 3, (1, 2): 2, (2, 1): 2}),
        ("interleaved-1f1b", 2, {(0, 1): 5, (1, 0): 5}),
    ],
)
def test_an_edge_holds_all_messages_that_may_be_under_way(name, ranks, capacities):
    edges = lower(build_schedule(name, ranks, 8)).edges
    assert {key: edge.capacity for key, edge in edges.items()} == capacities


def test_an_edge_holds_as_many_messages_of_each_value_that_skips_stages():
    program = replace(lower(build_schedule("interleaved-1f1b", 2, 8)), skips=((0, 3),))
    assert {key: edge.capacity for key, edge in program.edges.items()} == {(0, 1): 10, (1, 0): 10}


def test_an_edge_of_forwards_alone_holds_the_messages_that_are_awaited():
    schedule = Schedule.from_ops("forwards", TWO, 8, [[Op(s, Kind.F, n) for n in range(8)] for s in range(2)])
    (edge,) = lower(schedule).edges.values()
    assert edge.capacity == edge.slots == 1 + JITTER_SLOTS


def test_an_edge_where_nothing_is_ahead_has_its_slots():
    ops = [[Op(s, kind, n) for n in range(8) for kind in (Kind.F, Kind.B)] for s in range(2)]
    edges = lower(Schedule.from_ops("one by one", TWO, 8, ops)).edges
    assert {(edge.capacity, edge.slots) for edge in edges.values()} == {(1 + JITTER_SLOTS,) * 2}


@pytest.mark.parametrize("name", FEW)
def test_every_skip_is_given_once_and_taken_once_and_fits_its_edge(name):
    schedule = build_schedule(name, 4, 8)
    last = schedule.stages - 1
    skips = ((0, last), (1, last)) if last > 2 else ((0, last),)
    program = replace(lower(schedule), skips=skips)
    given, taken = Counter(), Counter()
    for rank in range(schedule.ranks):
        for line in program.instructions(rank):
            if line.route and line.action in (Action.SEND, Action.HAND):
                taker = next(t for t, route in program.consumers(line.row) if route == line.route)
                given[program.tag(taker, line.route)] += 1
            elif line.route and line.action in (Action.RECV, Action.TAKE):
                taken[program.tag(line.row, line.route)] += 1
    assert given == taken
    assert set(given.values()) == {1}
    assert len(given) == 2 * len(skips) * schedule.microbatches
    assert max(given) < program.tags
    for (source, target), edge in program.edges.items():
        # Even if nothing were taken before the backward, what is under way at once fits.
        assert edge.capacity >= edge.slots
        assert (source, target) == (edge.source, edge.target)
