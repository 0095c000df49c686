"""Counts whose schedule cannot be held are refused before anything is built."""

from __future__ import annotations

import pytest

from penstock.base.errors import ScheduleError
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.families.family import BYTES_PER_OP, BYTES_PER_RANK, MAX_RANKS, require_size

HUGE = 1_000_000_000


@pytest.mark.parametrize("family", FAMILIES)
def test_a_billion_microbatches_and_a_million_ranks_are_refused_by_every_family(family: str):
    with pytest.raises(
        ScheduleError, match=r"microbatches=1,000,000,000 is too large: it has \d+,000,000,000 ops"
    ):
        build_schedule(family, 4, HUGE)
    with pytest.raises(ScheduleError, match=r"ranks=1,000,000, .* a schedule has at most 100,000 ranks"):
        build_schedule(family, 1_000_000, 8)


def test_virtual_stages_count_as_well():
    with pytest.raises(ScheduleError, match="virtual_stages=1,000,000,000 and microbatches=8 is too large"):
        build_schedule("interleaved-1f1b", 4, 8, HUGE)


def test_the_estimate_is_held_against_the_memory_there_is():
    need = 2 * 4 * 1000 * BYTES_PER_OP + 4 * BYTES_PER_RANK
    require_size("1f1b", 4, 1000, 1, memory=need)
    with pytest.raises(
        ScheduleError, match="its 8,000 ops take about 0 GB of memory, and there are 0 GB here"
    ):
        require_size("1f1b", 4, 1000, 1, memory=need - 1)


def test_what_the_benchmarks_run_is_allowed():
    require_size("1f1b", 10_000, 8, 1)
    require_size("1f1b", 1024, 16_384, 1, memory=8 << 30)
    require_size("1f1b", MAX_RANKS, 1, 1, memory=8 << 30)
