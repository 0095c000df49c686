from __future__ import annotations

from fractions import Fraction

import pytest

from penstock.base.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.schedule.families.full_backward import legal_group, smallest_group
from penstock.schedule.memory import peak
from penstock.schedule.ops import Kind
from tests.support.lanes import slow
from tests.support.schedule_oracle import timed


def test_megatrons_own_example():
    """The order its docstring gives for 2 ranks, groups of 3 and 5 microbatches; chunk + 1, negative for backwards."""
    schedule = build_schedule("interleaved-1f1b", 2, 5, 2, group_size=3)
    signed = [(op.stage // 2 + 1) * (1 if op.kind == Kind.F else -1) for op in schedule.ops(0)]
    assert signed == [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]
    order = [op.microbatch for op in schedule.ops(0) if op.kind == Kind.F]
    assert order == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]


@pytest.mark.parametrize(
    ("p", "v", "family"),
    [(3, 3, "interleaved-1f1b"), (4, 2, "interleaved-zb"), *slow((4, 2, "interleaved-1f1b"))],
)
def test_every_legal_group_size_has_the_same_bubble_and_the_memory_of_the_formula(
    p: int, v: int, family: str
):
    tried = 0
    for m in range(p, 11):
        for n in range(1, m + 1):
            if not legal_group(p, m, n):
                continue
            schedule = build_schedule(family, p, m, v, group_size=n)
            check(schedule)
            zb = family == "interleaved-zb"
            assert timed(schedule, 2, 3, 2)[2] == Fraction((p - 1) * (3 if zb else 7)), (m, n)
            assert peak(schedule).tolist() == [
                min(m * v, (v - 1) * n + (p if zb else 2 * (p - 1 - r) + 1)) for r in range(p)
            ]
            tried += 1
    assert tried > 15


@pytest.mark.parametrize("family", ["interleaved-1f1b", "interleaved-zb"])
def test_an_illegal_group_size_is_refused_with_the_smallest_legal_one(family: str):
    with pytest.raises(ScheduleError, match=r"group_size must be .* 4 .* 9 .* got 4, take 5$"):
        build_schedule(family, 4, 9, 2, group_size=4)
    with pytest.raises(ScheduleError, match=r"group_size must be 3, .* got 2$"):
        build_schedule(family, 4, 3, 2, group_size=2)
    with pytest.raises(ScheduleError, match="group_size must be a whole number, got 4"):
        build_schedule(family, 4, 8, 2, group_size=4.0)
    assert build_schedule(family, 4, 3, 2, group_size=3) == build_schedule(family, 4, 3, 2)


def test_the_smallest_group_is_the_first_legal_one():
    for p in range(1, 9):
        for m in range(1, 30):
            legal = [n for n in range(1, m + 1) if legal_group(p, m, n)]
            assert smallest_group(p, m) == (legal[0] if legal else m)
            assert bool(legal) == (m >= p)


def test_with_one_virtual_stage_they_are_the_schedules_they_come_from():
    for p, m in ((1, 3), (3, 2), (4, 9)):
        assert build_schedule("interleaved-zb", p, m, 1) == build_schedule("zb-h1", p, m)
