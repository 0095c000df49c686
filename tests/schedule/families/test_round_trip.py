"""Round trip: every rank has every stage in turn, so that none is bound to a heavy one."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.schedule.memory import peak
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import read_csv, write_csv
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan
from tests.support.schedule_oracle import is_valid, lists


@st.composite
def round_trips(draw: st.DrawFn) -> Schedule:
    p, m, v = draw(st.integers(1, 6)), draw(st.integers(1, 20)), draw(st.integers(1, 3))
    options = {
        "group_size": draw(st.none() | st.integers(1, m)),
        "in_flight": draw(st.none() | st.sampled_from([k for k in range(1, p + 1) if not p % k])),
    }
    return build_schedule("round-trip", p, m, v, **options)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(round_trips())
def test_any_counts_and_groups_give_a_valid_schedule_in_the_memory_of_the_groups_in_flight(
    schedule: Schedule,
):
    check(schedule)
    assert is_valid(schedule.placement, schedule.microbatches, lists(schedule))
    size, count = schedule.options["group_size"], schedule.options["in_flight"]
    assert peak(schedule).max() <= count * (schedule.stages // schedule.ranks) * size


@settings(deadline=None, derandomize=True, max_examples=60)
@given(round_trips())
def test_a_rank_has_the_microbatches_of_a_group_on_a_stage_in_a_row(schedule: Schedule):
    """Groups are even, and there are no more of them than their size needs."""
    size, count, m = schedule.options["group_size"], schedule.options["in_flight"], schedule.microbatches
    groups = count * -(-m // (count * size))
    sizes = Counter(j * groups // m for j in range(m))
    assert max(sizes.values()) == size
    assert groups > m or min(sizes.values()) >= size - 1
    for rank in range(schedule.ranks):
        stays = Counter()
        for key, together in groupby(schedule.ops(rank), lambda op: (op.stage, op.microbatch * groups // m)):
            kinds, whole = "".join(op.kind.name for op in together), sizes[key[1]]
            if key[0] == schedule.stages - 1:
                assert kinds == "FB" * whole
            else:  # the highest stage of a round turns back at once
                assert kinds in ("F" * whole, "B" * whole, "F" * whole + "B" * whole)
            stays[key] += 1
        assert max(stays.values(), default=0) <= 2


@pytest.mark.parametrize(
    ("p", "v", "in_flight"), [(4, 2, None), (4, 1, 4), (6, 1, 3), (3, 2, None), (5, 1, 1)]
)
def test_over_p_groups_every_rank_has_every_stage_equally_often(p: int, v: int, in_flight: int | None):
    schedule = build_schedule("round-trip", p, 2 * p, v, group_size=1, in_flight=in_flight)
    each = [Counter(op.stage for op in schedule.ops(rank) if op.kind == Kind.F) for rank in range(p)]
    assert each == [Counter(dict.fromkeys(range(p * v), 2))] * p


def took(name: str, p: int, m: int, v: int, seconds: list[float], **options: object) -> float:
    """Makespan with forwards of these seconds a stage, and backwards of twice that."""
    schedule = build_schedule(name, p, m, v, **options)
    costs = Costs.of(schedule.placement, seconds, seconds, seconds)
    return float(makespan(simulate(check(schedule).program, costs)))


def test_a_heavy_last_stage_is_shared_by_the_ranks():
    """A head of four stages' work; the busiest rank of the others has 240 of it, and the mean is 132."""
    head = [1, 1, 1, 1, 1, 1, 1, 4]
    assert took("interleaved-1f1b", 4, 16, 2, head) == took("breadth-first", 4, 16, 2, head) == 249
    assert took("round-trip", 4, 16, 2, head) == 173
    assert took("round-trip", 4, 16, 2, head, group_size=2, in_flight=4) == 132


@pytest.mark.parametrize(("p", "v", "size"), [(2, 2, 1), (4, 2, 2), (3, 3, 3), (5, 1, 1)])
def test_with_a_group_for_every_rank_no_rank_idles_whatever_the_stages_cost(p: int, v: int, size: int):
    seconds = np.random.default_rng(p).integers(1, 9, p * v).tolist()
    m = 2 * p * size
    found = took("round-trip", p, m, v, seconds, group_size=size, in_flight=p)
    assert found == m * 3 * sum(seconds) / p


def test_groups_that_cannot_be_are_refused():
    with pytest.raises(
        ScheduleError, match=r"in_flight must divide the 6 ranks, got 4; take one of 1, 2, 3, 6"
    ):
        build_schedule("round-trip", 6, 12, in_flight=4)
    with pytest.raises(
        ScheduleError, match="round-trip: in_flight must divide the 6 ranks, got 7; take one of 1, 2, 3, 6"
    ):
        build_schedule("round-trip", 6, 12, in_flight=7)
    with pytest.raises(
        ScheduleError, match=r"round-trip: group_size must be a whole number from 1 to 12, got 2\.0"
    ):
        build_schedule("round-trip", 6, 12, group_size=2.0)


@pytest.mark.parametrize(("p", "v"), [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2)])
def test_a_file_is_read_with_the_same_first_copies(p: int, v: int, tmp_path: Path):
    schedule = build_schedule("round-trip", p, 4 * p, v)
    write_csv(schedule, tmp_path / "s.csv")
    assert read_csv(tmp_path / "s.csv") == schedule
    assert schedule.placement == Placement.on_all_ranks(p, v)
    assert [held[0] for held in schedule.placement.holders] == [s % p for s in range(p * v)]


def test_a_file_of_one_round_has_the_copies_that_it_shows(tmp_path: Path):
    write_csv(build_schedule("round-trip", 4, 8, 1), tmp_path / "s.csv")
    assert read_csv(tmp_path / "s.csv").placement.holders == ((0, 2), (1, 3), (2, 0), (3, 1))
