"""The catalogue of schedule families.

To add one, write its function in a file of this folder and add a line to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from penstock.base.errors import ScheduleError
from penstock.schedule.families.closed_forms import BUBBLES, PEAKS, Bubble, Peak
from penstock.schedule.families.controllable import v_half, v_min
from penstock.schedule.families.dualpipe import dualpipe, dualpipe_v
from penstock.schedule.families.family import Family
from penstock.schedule.families.full_backward import (
    breadth_first,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
)
from penstock.schedule.families.round_trip import round_trip
from penstock.schedule.families.searched import searched, zb_auto
from penstock.schedule.families.slots import chimera, hanayo
from penstock.schedule.families.zb_v import zb_v
from penstock.schedule.families.zero_bubble import interleaved_zb, zb_h1, zb_h2
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule

_SPLIT = "split backward"


@dataclass(frozen=True, kw_only=True)
class CatalogueFamily(Family):
    """One entry of the catalogue."""

    # Called with ranks and microbatches, with virtual stages if the user may choose them, and with options.
    rule: Callable[..., Schedule]
    source: str
    needs: str
    virtual_stages: int = 1  # per rank: the default, or the only number; for two opposite pipes, of each pipe
    least_virtual_stages: int = 1  # smallest number per rank that the user may choose
    place: Callable[[int, int], Placement] = Placement.loop  # from ranks and stages per rank
    searches: bool = False
    repeats: int = 1  # times as many microbatches as ranks after which a long order repeats itself

    @property
    def default_virtual_stages(self) -> int:
        return self.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """True if backwards run as two halves."""
        return _SPLIT in self.needs

    @property
    def has_copies(self) -> bool:
        """True if several ranks hold a stage."""
        return self.place(2, self.virtual_stages).has_copies

    @property
    def on_all_ranks(self) -> bool:
        """True if every rank holds every stage, and so as many weights as a replica."""
        placement = self.place(4, self.virtual_stages)
        return min(map(len, placement.holders)) == placement.ranks

    @property
    def in_order(self) -> bool:
        """True if a stage's gradients are summed in the order of the microbatches, on one rank: equal to the last bit."""
        return not self.has_copies

    @property
    def bubble(self) -> Bubble:
        return BUBBLES[self.name]

    @property
    def peak(self) -> Peak:
        return PEAKS[self.name]

    def make(
        self, ranks: int, microbatches: int, virtual_stages: int | None, options: Mapping[str, object]
    ) -> Schedule:
        v = self.virtual_stages if virtual_stages is None else virtual_stages
        if self.chooses_virtual_stages:
            return self.rule(ranks, microbatches, v, **options)
        if v != self.virtual_stages:
            choosing = ", ".join(f.name for f in FAMILIES.values() if f.chooses_virtual_stages)
            fixed = "one stage" if self.virtual_stages == 1 else f"{self.virtual_stages} stages"
            raise ScheduleError(
                f"{self.name} has {fixed} per rank, got {v}; the number of virtual stages is free in {choosing}"
            )
        return self.rule(ranks, microbatches, **options)


_TWICE = "two copies of every stage; even p"


def _two_way(ranks: int, virtual_stages: int) -> Placement:
    return Placement.two_way(ranks)


_looped = partial(CatalogueFamily, virtual_stages=2)
_waves = partial(CatalogueFamily, virtual_stages=2, place=Placement.waves)
_both_ways = partial(CatalogueFamily, place=_two_way)

FAMILIES: dict[str, CatalogueFamily] = {
    family.name: family
    for family in (
        CatalogueFamily("gpipe", rule=gpipe, source="GPipe, 1811.06965", needs="any counts"),
        CatalogueFamily("1f1b", rule=one_f_one_b, source="PipeDream-Flush, 2006.09503", needs="any counts"),
        CatalogueFamily("eager-1f1b", rule=eager_1f1b, source="AlpaComm, 2211.05322", needs="any counts"),
        _looped(
            "interleaved-1f1b", rule=interleaved_1f1b, source="Megatron-LM, 2104.04473", needs="any counts"
        ),
        _looped("breadth-first", rule=breadth_first, source="Lamy-Poirier, 2211.05953", needs="any counts"),
        CatalogueFamily("zb-h1", rule=zb_h1, source="Zero Bubble, 2401.10241", needs=f"any counts; {_SPLIT}"),
        CatalogueFamily("zb-h2", rule=zb_h2, source="Zero Bubble, 2401.10241", needs=f"any counts; {_SPLIT}"),
        CatalogueFamily(
            "zb-auto",
            rule=zb_auto,
            source="Zero Bubble, 2401.10241",
            needs=f"any counts; {_SPLIT}; costs, memory limit",
            searches=True,
        ),
        _looped(
            "interleaved-zb",
            rule=interleaved_zb,
            source="torch InterleavedZeroBubble",
            needs=f"any counts; {_SPLIT}",
        ),
        _waves("zb-v", rule=zb_v, source="Zero Bubble, 2401.10241", needs=f"any p, m; V; {_SPLIT}"),
        _waves(
            "v-half", rule=v_half, source="Controllable Memory, 2405.15362", needs=f"any p, m; V; {_SPLIT}"
        ),
        _waves("v-min", rule=v_min, source="Controllable Memory, 2405.15362", needs=f"any p, m; V; {_SPLIT}"),
        _both_ways(
            "dualpipe", rule=dualpipe, source="deepseek-ai/DualPipe", needs=f"{_TWICE}; pairs; {_SPLIT}"
        ),
        _waves(
            "dualpipe-v",
            rule=dualpipe_v,
            source="deepseek-ai/DualPipe",
            needs=f"any p, m; V; pairs; {_SPLIT}",
        ),
        _both_ways("chimera", rule=chimera, source="Chimera, 2107.06925", needs=_TWICE),
        _waves(
            "hanayo",
            rule=hanayo,
            source="Hanayo, 2308.15762",
            needs="even v (v/2 waves)",
            least_virtual_stages=2,
        ),
        _looped(
            "round-trip",
            rule=round_trip,
            source="after RoundPipe, 2604.27085",
            needs="any counts; all stages on every rank",
            place=Placement.on_all_ranks,
            repeats=2,
        ),
        CatalogueFamily(
            "searched",
            rule=searched,
            source="search of Penstock",
            needs=f"loop, V or two pipes; {_SPLIT} unless full; costs, memory limit",
            searches=True,
        ),
    )
}
