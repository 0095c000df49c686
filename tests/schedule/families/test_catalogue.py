"""What every family of the catalogue builds, and counts that are refused before anything is built."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from penstock.base.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.families.family import BYTES_PER_OP, BYTES_PER_RANK, MAX_RANKS, require_size
from penstock.schedule.memory import peak
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from tests.support.schedules import allows

DRAWING = re.compile(r"(\d+) ranks, (\d+) microbatches(?:, (\d+) virtual stages)?\n((?: +.*\n)+)")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_builds_what_its_docstring_draws(name: str):
    family = FAMILIES[name]
    drawn = DRAWING.search(inspect.getdoc(family.rule) + "\n")
    assert drawn is not None
    p, m, v = (int(count) if count else None for count in drawn.groups()[:3])
    lines = re.split(r"\s*rank \d+\s+", " ".join(drawn.group(4).split()))[1:]
    schedule = family.build(p, m, v)
    assert [schedule.text(rank) for rank in range(p)] == [line.strip() for line in lines]
    assert schedule.name == name


def test_the_catalogue_is_complete():
    assert list(FAMILIES) == [
        "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2", "zb-auto",
        "interleaved-zb", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v", "chimera", "hanayo", "round-trip",
        "searched",
    ]  # fmt: skip
    for family in FAMILIES.values():
        assert family.source
        assert family.needs
        assert family.bubble.text
        assert family.peak.text


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(f.name, p) for f in FAMILIES.values() for p in (2, 3) if allows(f, p, f.virtual_stages)],
)
def test_in_order_says_whether_each_stages_gradients_are_summed_in_order_on_one_rank(name: str, ranks: int):
    family = FAMILIES[name]
    in_order, said = True, True
    for m in (1, 5):
        schedule = family.build(ranks, m)
        said &= schedule.in_order
        for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W)):
            for stage in range(schedule.stages):
                rows = np.flatnonzero((schedule.stage == stage) & np.isin(schedule.kind, kinds))
                in_order &= (np.diff(schedule.microbatch[rows]) > 0).all()
                in_order &= len({schedule.rank_of(row) for row in rows}) == 1
    assert in_order == family.in_order == said
    assert family.in_order != schedule.placement.has_copies


@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank_is_allowed_or_refused_with_a_way_out(name: str):
    if name in ("dualpipe", "chimera"):
        with pytest.raises(
            ScheduleError, match=f"{name} needs an even number of ranks, got 1; .* takes any number"
        ):
            build_schedule(name, 1, 4)
    else:
        assert check(build_schedule(name, 1, 4)).program.edges == {}


PLACED = {
    Placement.loop(4): ["zb-auto"],
    Placement.loop(4, 3): ["interleaved-zb", "breadth-first"],
    Placement.waves(4): ["zb-v", "v-half", "v-min", "dualpipe-v"],
    Placement.two_way(4): ["dualpipe", "chimera"],
    Placement.on_all_ranks(4, 3): ["round-trip"],
}


def test_placements():
    for placement, names in PLACED.items():
        for name in names:
            v = 3 if FAMILIES[name].chooses_virtual_stages else None
            assert build_schedule(name, 4, 6, v).placement == placement, name
    assert build_schedule("hanayo", 3, 6, 4).placement == Placement.waves(3, 4)
    with pytest.raises(ScheduleError, match="virtual_stages must be even, got 3"):
        build_schedule("hanayo", 2, 2, 3)


@pytest.mark.parametrize(
    ("name", "near"),
    [("1f1n", "'1f1b'"), ("zbv", "'zb-v'"), ("interleaved", "'interleaved-zb'"), ("dual-pipe", "'dualpipe'")],
)
def test_an_unknown_family_is_answered_with_its_nearest_names(name: str, near: str):
    with pytest.raises(ScheduleError, match=rf"no schedule family '{name}' \(did you mean .*{near}"):
        build_schedule(name, 2, 2)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "4", None])
def test_counts_that_are_none_are_refused(count: object):
    for position, what in enumerate(("ranks", "microbatches", "virtual_stages")):
        counts: list[object] = [2, 2, 1]
        counts[position] = count
        if count is None and what == "virtual_stages":
            continue
        with pytest.raises(ScheduleError, match=f"{what} must be a whole number of at least 1, got"):
            build_schedule("1f1b", *counts)


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if not f.chooses_virtual_stages])
def test_a_family_with_its_own_number_of_virtual_stages_says_who_takes_others(name: str):
    with pytest.raises(ScheduleError, match=f"{name} has .* per rank, got 3; .* free in interleaved-1f1b, "):
        build_schedule(name, 4, 4, 3)


def test_an_unknown_option_is_refused_with_those_there_are():
    with pytest.raises(ScheduleError, match="1f1b has no option 'group_size'; it takes none"):
        build_schedule("1f1b", 2, 2, group_size=2)
    with pytest.raises(
        ScheduleError, match=r"no option 'groupsize' \(did you mean 'group_size'\?\); it takes group_size"
    ):
        build_schedule("interleaved-zb", 2, 2, groupsize=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_more_microbatches_never_take_fewer_activations(name: str):
    peaks = [peak(build_schedule(name, 4, m)).max() for m in (1, 4, 8, 16)]
    assert peaks == sorted(peaks)


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
