"""A family of schedules: a function of the counts that builds a schedule."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.base.errors import ScheduleError, nearest
from penstock.schedule.schedule import Schedule
from penstock.schedule.size import require_size

COUNTS = ("ranks", "microbatches", "virtual_stages")


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
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ScheduleError(f"{name} must be a whole number of at least 1, got {count!r}")
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
