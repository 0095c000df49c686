from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from penstock.base.errors import ScheduleError
from penstock.schedule.ops import Kind, Op, Pair
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
    assert list(schedule.ops(1)) == [
        Op(1, Kind.F, 0),
        Pair(Op(1, Kind.F, 1), Op(1, Kind.B, 0)),
        Op(1, Kind.B, 1),
    ]
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
