"""A family of schedules: a function of the counts that builds a schedule, and the largest counts that it may have."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.base import host
from penstock.base.counts import require_count
from penstock.base.errors import ScheduleError, nearest
from penstock.schedule.schedule import Schedule

COUNTS = ("ranks", "microbatches", "virtual_stages")

MAX_RANKS = 100_000
"""Loops over ranks run in Python and would take minutes each for more."""

MAX_OPS = 2**31 - 1
"""Rows of a schedule are numbered in int32."""

BYTES_PER_OP = 150
"""Memory to build, prove and simulate one op; measured at 1.6 million ops (125 to 210)."""

BYTES_PER_RANK = 2_000
"""Memory besides for each rank; measured at 100,000 ranks of two ops each (1,800)."""


@dataclass(frozen=True)
class Family(ABC):
    """One family, of the catalogue or of the user."""

    name: str
    rule: Callable[..., object]

    @property
    @abstractmethod
    def default_virtual_stages(self) -> int:
        """Number of stages per rank if the user does not choose it."""

    @abstractmethod
    def make(
        self, ranks: int, microbatches: int, virtual_stages: int | None, options: Mapping[str, object]
    ) -> Schedule:
        """Build the schedule; counts and options have been checked."""

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
        return [
            name
            for name, parameter in self.parameters.items()
            if name not in COUNTS and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]

    def require_counts(self, ranks: int, microbatches: int, virtual_stages: int | None = None) -> int:
        """Return the number of virtual stages, after checking the counts."""
        v = self.default_virtual_stages if virtual_stages is None else virtual_stages
        for name, count in (("ranks", ranks), ("microbatches", microbatches), ("virtual_stages", v)):
            require_count(name, count, kind=ScheduleError)
        require_size(self.name, ranks, microbatches, v)
        return v

    def build(
        self, ranks: int, microbatches: int, virtual_stages: int | None = None, **options: object
    ) -> Schedule:
        """Build a schedule of this family; see `build_schedule`."""
        self.require_counts(ranks, microbatches, virtual_stages)
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.parameters.values())
        for option in options:
            if option not in self.options and not takes_any:
                known = f"it takes {', '.join(self.options)}" if self.options else "it takes none"
                raise ScheduleError(
                    f"{self.name} has no option {option!r}{nearest(option, self.options)}; {known}"
                )
        return self.make(ranks, microbatches, virtual_stages, options)


def require_size(
    name: str, ranks: int, microbatches: int, virtual_stages: int, memory: int | None = None
) -> None:
    """Raise `ScheduleError` if a schedule would not fit in so many bytes of memory.

    The default is all memory of the machine or container, free or not, so that equal machines give equal answers.
    """
    if memory is None:
        here = host.memory()
        memory = here.total if here is not None else None
    ops = 2 * ranks * virtual_stages * microbatches  # a forward and a backward, if it is not split
    bytes_ = ops * BYTES_PER_OP + ranks * BYTES_PER_RANK
    asked = (
        f"{name} with ranks={ranks:,}, virtual_stages={virtual_stages:,} and microbatches={microbatches:,}"
    )
    if ranks > MAX_RANKS:
        raise ScheduleError(f"{asked} is too large: a schedule has at most {MAX_RANKS:,} ranks")
    if ops > MAX_OPS:
        raise ScheduleError(
            f"{asked} is too large: it has {ops:,} ops, and a schedule has at most {MAX_OPS:,}; take fewer microbatches"
        )
    if memory is not None and bytes_ > memory:
        raise ScheduleError(
            f"{asked} is too large: its {ops:,} ops take about {bytes_ / 1e9:,.0f} GB of memory, and there are "
            f"{memory / 1e9:,.0f} GB here; take fewer microbatches"
        )
