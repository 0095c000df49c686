"""The analysis of one step, shared by the page and the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.base.errors import PenstockError
from penstock.show.advice import Advice, advise, compare_with_plan, where_time_went
from penstock.show.planned import PlannedStep, plan
from penstock.show.units import is_measured
from penstock.trace.bubbles import Bubbles, bubbles
from penstock.trace.events import Trace
from penstock.trace.join import present
from penstock.trace.memory_curve import peaks


@dataclass(frozen=True, eq=False)
class StepAnalysis:
    """One trace and what follows from it, each part computed once and only if asked for.

    Without the simulation that made the trace, the plan is worked out from the trace.
    """

    label: str
    trace: Trace
    simulation: PlannedStep | None = None

    @property
    def measured(self) -> bool:
        """True if the trace was recorded in a run, so that it can differ from its plan."""
        return is_measured(self.trace)

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks that have events, ascending."""
        return present(self.trace)

    @cached_property
    def bubbles(self) -> Bubbles:
        """The time of every rank, by cause."""
        return bubbles(self.trace)

    @cached_property
    def peaks(self) -> npt.NDArray[np.int64] | None:
        """The most every rank holds, shape (ranks,); None if the trace does not say."""
        return None if self.trace.held is None else peaks(self.trace)

    @property
    def plan(self) -> PlannedStep | None:
        """The same step from its own usual costs; None if the trace does not allow one."""
        return self._plan_or_reason[0]

    @property
    def unplanned(self) -> str:
        """The reason why there is no plan; empty if there is one."""
        return self._plan_or_reason[1]

    @cached_property
    def _plan_or_reason(self) -> tuple[PlannedStep | None, str]:
        try:
            return self.simulation or plan(self.trace), ""
        except PenstockError as error:
            return None, str(error)

    @cached_property
    def advice(self) -> Advice | None:
        """Changes that were simulated, and the best of them; None without a plan."""
        return None if self.plan is None else advise(self.trace, self.plan)

    @cached_property
    def where(self) -> str:
        """A sentence that says where the time went."""
        return where_time_went(self.bubbles, self.ranks)

    @property
    def sentences(self) -> list[str]:
        """Where the time went, what would shorten it, and the difference to the plan, for page and terminal."""
        if self.advice is None:
            return [self.where, f"There is no plan to compare with: {self.unplanned}."]
        return [self.where, self.advice.sentence, *([self.over_plan] if self.over_plan else [])]

    @property
    def to_try(self) -> list[str]:
        """The lines that make the changes that `sentences` name, in their order."""
        return (
            []
            if self.advice is None
            else [line for change in self.advice.proposed for line in change.lines.all]
        )

    @cached_property
    def over_plan(self) -> str:
        """A sentence that compares a measured step with its plan; empty if it has no plan or was simulated."""
        if self.plan is None or not self.measured:
            return ""
        return compare_with_plan(self.bubbles, bubbles(self.plan.trace))
