"""Ops, placements, schedules and their index: what they hold, how they are written, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ScheduleError
from penstock.schedule.index import index, links, rank_column
from penstock.schedule.ops import Kind, Op, Pair, parse_op
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from tests.support.schedules import schedules, written

TWO = Placement.loop(2)


def test_columns_hold_the_ops_rank_after_rank():
    schedule = written(TWO, 2, "0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1")
    assert schedule.offsets.tolist() == [0, 4, 8]
    assert schedule.rows(1) == slice(4, 8)
    assert [schedule.rank_of(row) for row in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert schedule.paired.tolist() == [False] * 5 + [True] + [False] * 2
    assert schedule.op(5) == Op(1, Kind.F, 1)
    pair = Pair(Op(1, Kind.F, 1), Op(1, Kind.B, 0))
    assert list(schedule.ops(1)) == [Op(1, Kind.F, 0), pair, Op(1, Kind.B, 1)]
    assert schedule.text(1) == "1F0 (1F1;1B0)OVERLAP_F_B 1B1"
    assert len(schedule) == 8
    assert repr(schedule) == "Schedule('written', 2 ranks, 2 stages, 2 microbatches, 8 ops)"


@given(schedules(ranks=4, microbatches=5))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_objects_and_columns_are_the_same_schedule(schedule: Schedule):
    ops = [list(schedule.ops(rank)) for rank in range(schedule.ranks)]
    again = Schedule.from_ops("again", schedule.placement, schedule.microbatches, ops)
    assert again == schedule
    columns = [schedule.columns(rank) for rank in range(schedule.ranks)]
    assert Schedule.from_columns("again", schedule.placement, schedule.microbatches, columns) == schedule


def test_schedules_differ_by_order_counts_and_placement():
    schedule = written(TWO, 1, "0F0 0B0", "1F0 1B0")
    assert schedule == written(TWO, 1, "0F0 0B0", "1F0 1B0")
    assert schedule != written(TWO, 1, "0B0 0F0", "1F0 1B0")
    assert schedule != written(TWO, 2, "0F0 0B0", "1F0 1B0")
    assert schedule != written(Placement(2, ((1,), (0,))), 1, "0F0 0B0", "1F0 1B0")
    assert schedule != "a schedule"


def test_lists_must_be_one_a_rank_and_microbatches_at_least_one():
    with pytest.raises(ScheduleError, match="1 lists of ops for 2 ranks"):
        Schedule.from_ops("short", TWO, 1, [[]])
    with pytest.raises(ScheduleError, match="microbatches must be at least 1, got 0"):
        Schedule.from_ops("none", TWO, 0, [[], []])


def test_a_rank_may_be_without_ops():
    schedule = Schedule.from_ops("half", TWO, 1, [[Op(0, Kind.F, 0)], []])
    assert schedule.offsets.tolist() == [0, 1, 1]
    assert list(schedule.ops(1)) == []
    assert schedule.stage.dtype == np.int32


SCHEDULE = written(Placement.loop(2), 2, "0F0 0F1 0B0 0I1 0W1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1")


def test_every_op_is_found_by_stage_and_microbatch():
    where = index(SCHEDULE)
    assert where.forward.tolist() == [[0, 1], [5, 6]]
    assert where.backward.tolist() == [[2, 3], [7, 8]]
    assert where.weight is not None
    assert where.weight.tolist() == [[-1, 4], [-1, -1]]


def test_every_op_takes_what_the_next_stage_towards_it_hands_over():
    source, target = links(SCHEDULE, index(SCHEDULE))
    assert source.tolist() == [-1, -1, 7, 8, -1, 0, 1, -1, -1]
    assert target.tolist() == [5, 6, -1, -1, -1, -1, -1, 2, 3]


def test_rows_know_their_rank():
    assert rank_column(SCHEDULE).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert index(written(Placement.loop(1), 1, "0F0 0B0")).weight is None


OPS = st.builds(Op, st.integers(0, 10**9 - 1), st.sampled_from(Kind), st.integers(0, 10**9 - 1))


@settings(max_examples=30)
@given(OPS)
def test_an_op_is_read_as_it_is_written(op: Op):
    assert parse_op(str(op)) == op
    assert parse_op(f"  {op}\t") == op


@settings(max_examples=50)
@given(OPS, OPS)
def test_only_a_forward_and_then_a_backward_make_a_pair(a: Op, b: Op):
    text = str(Pair(a, b))
    if a.kind == Kind.F and b.kind in (Kind.B, Kind.I):
        assert parse_op(text) == Pair(a, b)
    else:
        with pytest.raises(ScheduleError, match="a pair is a forward"):
            parse_op(text)


def test_the_text_form_is_pytorchs():
    assert str(Op(3, Kind.F, 0)) == "3F0"
    assert str(Pair(Op(0, Kind.F, 7), Op(7, Kind.B, 3))) == "(0F7;7B3)OVERLAP_F_B"


@pytest.mark.parametrize(
    "text",
    ["", "F0", "3F", "3X0", "3F0 1B0", "-1F0", "3f0", "3F0.5", "(0F7)OVERLAP_F_B", "(0F7;7B3)", "3SEND_F0", "٣F٠"],
)  # fmt: skip
def test_anything_else_is_refused_with_what_an_op_looks_like(text: str):
    with pytest.raises(ScheduleError, match="3F0"):
        parse_op(text)


@pytest.mark.parametrize("text", ["1" * 10 + "F0", "0F" + "9" * 5000])
def test_numbers_too_long_to_be_counts_are_refused(text: str):
    with pytest.raises(ScheduleError, match="nine digits"):
        parse_op(text)


def test_a_loop_goes_round_the_ranks():
    assert Placement.loop(3, 2).holders == ((0,), (1,), (2,), (0,), (1,), (2,))
    assert Placement.loop(3, 2).stages_of == ((0, 3), (1, 4), (2, 5))


def test_waves_go_down_and_up():
    assert Placement.waves(3).stages_of == ((0, 5), (1, 4), (2, 3))
    assert Placement.waves(2, 4).stages_of == ((0, 3, 4, 7), (1, 2, 5, 6))
    assert Placement.waves(1).stages_of == ((0, 1),)


def test_two_pipes_hold_every_stage_twice_and_save_the_one_that_goes_down():
    placement = Placement.two_way(4)
    assert placement.holders == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert placement.has_copies
    assert not Placement.loop(4).has_copies


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 9))
def test_every_rank_of_a_loop_or_wave_holds_the_same_number_of_stages(ranks: int, virtual_stages: int):
    for placement in (Placement.loop(ranks, virtual_stages), Placement.waves(ranks, virtual_stages)):
        assert placement.stages == ranks * virtual_stages
        assert {len(held) for held in placement.stages_of} == {virtual_stages}


@pytest.mark.parametrize(
    ("ranks", "holders", "says"),
    [
        (0, ((0,),), "ranks must be at least 1"),
        (2, (), "at least one stage"),
        (2, ((0,), ()), "stage 1 is placed on ranks []"),
        (2, ((0,), (2,)), "out of 0..1"),
        (2, ((0, 0), (1,)), "each once"),
        (3, ((0,), (2,)), "rank(s) [1] hold no stage"),
    ],
)
def test_a_placement_that_makes_no_sense_is_refused(ranks: int, holders: tuple, says: str):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        Placement(ranks, holders)


def test_two_pipes_loops_and_waves_of_nothing_are_refused():
    for ranks in (0, 1, 3):
        with pytest.raises(ScheduleError, match="even number of ranks"):
            Placement.two_way(ranks)
    for make in (Placement.loop, Placement.waves):
        with pytest.raises(ScheduleError, match="at least 1, got 0 and 1"):
            make(0, 1)
        with pytest.raises(ScheduleError, match="at least 1, got 2 and 0"):
            make(2, 0)
