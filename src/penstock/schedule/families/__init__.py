"""The catalogue of schedule families, and `build_schedule`, which builds one by name.

A family is a function that returns a Schedule. To add one, write the function in a file here and add a line to `FAMILIES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.errors import ScheduleError, nearest
from penstock.schedule.families.breadth_first import breadth_first
from penstock.schedule.families.closed_forms import BUBBLES, PEAKS, Bubble, Peak
from penstock.schedule.families.controllable import v_half, v_min
from penstock.schedule.families.dualpipe import dualpipe, dualpipe_v
from penstock.schedule.families.gpipe import gpipe
from penstock.schedule.families.interleaved import interleaved_1f1b
from penstock.schedule.families.one_f_one_b import eager_1f1b, one_f_one_b
from penstock.schedule.families.searched import searched
from penstock.schedule.families.slots import chimera, hanayo
from penstock.schedule.families.zb_auto import zb_auto
from penstock.schedule.families.zb_v import zb_v
from penstock.schedule.families.zero_bubble import interleaved_zb, zb_h1, zb_h2
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.size import require_size

_COUNTS = ("ranks", "microbatches", "virtual_stages")
_SPLIT = "split backward"


@dataclass(frozen=True)
class Family:
    """One entry of the catalogue.

    Attributes:
        name: name that users write.
        rule: function that builds the schedule, ``rule(ranks, microbatches, **options)``, with ``virtual_stages`` third if
            the user may choose it.
        source: paper or code that the rule comes from.
        needs: requirements on counts, model and memory, as text.
        virtual_stages: default number of stages a rank, or the only one. If two pipes pass the ranks in opposite
            directions, each has this many.
        in_order: whether the gradients of every stage are summed in the order of the microbatches, on one rank; then a
            run is bit-equal to plain accumulation.
        least_virtual_stages: smallest number of stages a rank that the user may choose.
        place: function of ranks and stages a rank that returns the placement of the family's stages.
        searches: True if building a schedule is a search that takes seconds.
    """

    name: str
    rule: Callable[..., Schedule]
    source: str
    needs: str
    virtual_stages: int = 1
    in_order: bool = True
    least_virtual_stages: int = 1
    place: Callable[[int, int], Placement] = Placement.loop
    searches: bool = False

    @property
    def splits_backward(self) -> bool:
        """True if backwards run as two halves."""
        return _SPLIT in self.needs

    @property
    def bubble(self) -> Bubble:
        return BUBBLES[self.name]

    @property
    def peak(self) -> Peak:
        return PEAKS[self.name]

    @property
    def chooses_virtual_stages(self) -> bool:
        """True if the user may choose the number of virtual stages."""
        return "virtual_stages" in self.parameters

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.rule).parameters

    @property
    def options(self) -> list[str]:
        """Names of the parameters besides the counts."""
        return [name for name in self.parameters if name not in _COUNTS]

    def require_counts(self, ranks: int, microbatches: int, virtual_stages: int | None = None) -> int:
        """Return the number of virtual stages, after checking the counts.

        Raises:
            ScheduleError: if a count is no whole number of at least 1, or the schedule would not fit in memory.
        """
        v = self.virtual_stages if virtual_stages is None else virtual_stages
        for name, count in (("ranks", ranks), ("microbatches", microbatches), ("virtual_stages", v)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ScheduleError(f"{name} must be a whole number of at least 1, got {count!r}")
        require_size(self.name, ranks, microbatches, v)
        return v

    def build(
        self, ranks: int, microbatches: int, virtual_stages: int | None = None, **options: object
    ) -> Schedule:
        """Build a schedule of this family; see `build_schedule`."""
        v = self.require_counts(ranks, microbatches, virtual_stages)
        for option in options:
            if option not in self.options:
                known = f"it takes {', '.join(self.options)}" if self.options else "it takes none"
                raise ScheduleError(
                    f"{self.name} has no option {option!r}{nearest(option, self.options)}; {known}"
                )
        if self.chooses_virtual_stages:
            return self.rule(ranks, microbatches, v, **options)
        if v != self.virtual_stages:
            choosing = ", ".join(f.name for f in FAMILIES.values() if f.chooses_virtual_stages)
            fixed = "one stage" if self.virtual_stages == 1 else f"{self.virtual_stages} stages"
            raise ScheduleError(
                f"{self.name} has {fixed} a rank, got {v}; the number of virtual stages is free in {choosing}"
            )
        return self.rule(ranks, microbatches, **options)


_TWICE = "two copies of every stage; even p"


def _two_way(ranks: int, virtual_stages: int) -> Placement:
    return Placement.two_way(ranks)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("gpipe", gpipe, "GPipe, 1811.06965", "any counts"),
        Family("1f1b", one_f_one_b, "PipeDream-Flush, 2006.09503", "any counts"),
        Family("eager-1f1b", eager_1f1b, "AlpaComm, 2211.05322", "any counts"),
        Family("interleaved-1f1b", interleaved_1f1b, "Megatron-LM, 2104.04473", "any counts", 2),
        Family("breadth-first", breadth_first, "Lamy-Poirier, 2211.05953", "any counts", 2),
        Family("zb-h1", zb_h1, "Zero Bubble, 2401.10241", f"any counts; {_SPLIT}"),
        Family("zb-h2", zb_h2, "Zero Bubble, 2401.10241", f"any counts; {_SPLIT}"),
        Family(
            "zb-auto",
            zb_auto,
            "Zero Bubble, 2401.10241",
            f"any counts; {_SPLIT}; costs, memory limit",
            searches=True,
        ),
        Family("interleaved-zb", interleaved_zb, "torch InterleavedZeroBubble", f"any counts; {_SPLIT}", 2),
        Family("zb-v", zb_v, "Zero Bubble, 2401.10241", f"any p, m; V; {_SPLIT}", 2, place=Placement.waves),
        Family(
            "v-half",
            v_half,
            "Controllable Memory, 2405.15362",
            f"any p, m; V; {_SPLIT}",
            2,
            place=Placement.waves,
        ),
        Family(
            "v-min",
            v_min,
            "Controllable Memory, 2405.15362",
            f"any p, m; V; {_SPLIT}",
            2,
            place=Placement.waves,
        ),
        Family(
            "dualpipe",
            dualpipe,
            "deepseek-ai/DualPipe",
            f"{_TWICE}; pairs; {_SPLIT}",
            in_order=False,
            place=_two_way,
        ),
        Family(
            "dualpipe-v",
            dualpipe_v,
            "deepseek-ai/DualPipe",
            f"any p, m; V; pairs; {_SPLIT}",
            2,
            place=Placement.waves,
        ),
        Family("chimera", chimera, "Chimera, 2107.06925", _TWICE, in_order=False, place=_two_way),
        Family(
            "hanayo",
            hanayo,
            "Hanayo, 2308.15762",
            "even v (v/2 waves)",
            2,
            least_virtual_stages=2,
            place=Placement.waves,
        ),
        Family(
            "searched",
            searched,
            "search of Penstock",
            f"loop, V or two pipes; {_SPLIT} unless full; costs, memory limit",
            searches=True,
        ),
    )
}


def build_schedule(
    name: str, ranks: int, microbatches: int, virtual_stages: int | None = None, **options: object
) -> Schedule:
    """Build a schedule of the catalogue by family name.

    Args:
        name: family name, a key of `FAMILIES`.
        ranks: number of ranks, at least 1.
        microbatches: number of microbatches in a step, at least 1.
        virtual_stages: number of stages a rank (default: the family's).
        options: keyword arguments of the family's rule besides the counts.

    Raises:
        ScheduleError: if there is no such family or option, or the family does not allow the counts.
    """
    if name not in FAMILIES:
        raise ScheduleError(
            f"no schedule family {name!r}{nearest(name, list(FAMILIES))}; there are {', '.join(FAMILIES)}"
        )
    return FAMILIES[name].build(ranks, microbatches, virtual_stages, **options)
