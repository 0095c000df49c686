"""The catalogue: every family by name, and `build_schedule`, which builds one.

A family is a function that returns a Schedule; a new one is a function in a file here and a line in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import ScheduleError, nearest
from penstock.schedule.families.gpipe import gpipe
from penstock.schedule.families.interleaved import interleaved_1f1b
from penstock.schedule.families.one_f_one_b import one_f_one_b
from penstock.schedule.schedule import Schedule


@dataclass(frozen=True)
class Family:
    """One entry of the catalogue.

    Attributes:
        name: what a user writes.
        build: ``build(ranks, microbatches, virtual_stages, **options)``.
        source: the paper or code the rule comes from.
        needs: what the counts must satisfy, in words.
        virtual_stages: the number of virtual stages used when the user names none.
    """

    name: str
    build: Callable[..., Schedule]
    source: str
    needs: str
    virtual_stages: int = 1


def _single(build: Callable[[int, int], Schedule], name: str) -> Callable[..., Schedule]:
    def checked(ranks: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
        if virtual_stages != 1:
            raise ScheduleError(
                f"{name} has one stage a rank, not {virtual_stages}; interleaved-1f1b takes virtual stages"
            )
        return build(ranks, microbatches)

    return checked


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("gpipe", _single(gpipe, "gpipe"), "GPipe, 1811.06965", "any counts"),
        Family("1f1b", _single(one_f_one_b, "1f1b"), "PipeDream-Flush, 2006.09503", "any counts"),
        Family(
            "interleaved-1f1b",
            interleaved_1f1b,
            "Megatron-LM, 2104.04473",
            "any counts; group size >= ranks",
            2,
        ),
    )
}


def build_schedule(
    name: str, ranks: int, microbatches: int, virtual_stages: int | None = None, **options: object
) -> Schedule:
    """Build a schedule of the catalogue by family name.

    Args:
        name: a key of `FAMILIES`.
        ranks: number of ranks, at least 1.
        microbatches: microbatches a step, at least 1.
        virtual_stages: stages a rank; the family's own number if not given.
        options: the family's further parameters.

    Raises:
        ScheduleError: no such family, or counts it does not allow.
    """
    if name not in FAMILIES:
        raise ScheduleError(
            f"no schedule family {name!r}{nearest(name, list(FAMILIES))}; there are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    v = family.virtual_stages if virtual_stages is None else virtual_stages
    for what, count in (("ranks", ranks), ("microbatches", microbatches), ("virtual_stages", v)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ScheduleError(f"{what} must be a whole number of at least 1, not {count!r}")
    return family.build(ranks, microbatches, v, **options)
