"""The analysis of one step, shared by the page and the terminal, with sentences of advice.

Advice says where a step's time went, and the simulated change that would shorten it most. Every change is simulated with
the costs that the step itself shows, so its gain is over the step's plan, not over a guess. Where ranks slow each other
down, ops get longer as ranks wait less; and every op has the overhead that the step shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.base.errors import PenstockError
from penstock.show.palette import CAUSES
from penstock.show.planned import PlannedStep, plan
from penstock.show.units import is_measured
from penstock.show.what_if.alternatives import Alternatives, Change
from penstock.trace.bubbles import Bubbles, bubbles
from penstock.trace.events import API, Trace
from penstock.trace.join import present
from penstock.trace.messages import peaks

MIN_GAIN = 0.02
"""The least share of the step that a change has to save to be named."""
_WORTH_SHOWING = 0.002
"""The least share of the step that a change has to save to be listed: less is rounding of the medians."""


@dataclass(frozen=True)
class Advice:
    """The best of all simulated changes."""

    sentence: str
    proposed: tuple[Change, ...]
    # Everything that was simulated: the present order first, then the quickest first.
    changes: tuple[Change, ...]

    @property
    def better(self) -> tuple[Change, ...]:
        """The changes that make the step shorter, the quickest first."""
        now, *others = self.changes
        return tuple(c for c in others if c.makespan < now.makespan * (1 - _WORTH_SHOWING))


def where_time_went(bubbles: Bubbles, ranks: Sequence[int]) -> str:
    """Return a sentence that says how much of the ranks' time was idle, and why; ranks without events do not count."""
    total = float(bubbles.makespan) * len(ranks)
    idle = {cause: float(time[ranks].sum()) / total if total else 0.0 for cause, time in bubbles.idle.items()}
    share = sum(idle.values())
    if share < 0.001:
        return "The ranks computed all the time."
    largest = max(idle, key=lambda cause: idle[cause])
    return f"{share:.1%} of the ranks' time was idle. The largest part, {idle[largest]:.1%}, was {CAUSES[largest].sentence}."


def compare_with_plan(bubbles: Bubbles, planned: Bubbles) -> str:
    """Return a sentence that says how much longer a step took than its plan, and what makes up most of the difference."""
    more = float(bubbles.makespan) - float(planned.makespan)
    share = more / float(planned.makespan) if planned.makespan else 0.0
    if abs(share) < 0.005:
        return "The step took as long as planned from its usual op times."
    # A rank's work and its imbalance add up to the work of the busiest rank.
    parts = {"busy": float(bubbles.busy.max() - planned.busy.max())}
    for cause in bubbles.idle:
        if cause != "imbalance":
            parts[cause] = float((bubbles.idle[cause] - planned.idle[cause]).mean())
    longer = more > 0
    largest = max(parts, key=lambda part: parts[part] if longer else -parts[part])
    if largest == "busy":
        name = f"work of the busiest rank, whose ops took {'longer' if longer else 'less'} than usual"
    else:
        name = f"{'' if longer else 'less '}{CAUSES[largest].meaning}"
    return (
        f"The step took {abs(share):.1%} {'longer' if longer else 'less'} than planned from its usual op times. The largest "
        f"part of the difference, {abs(parts[largest]) / float(planned.makespan):.1%} of the plan, is {name}."
    )


def advise(trace: Trace, plan: PlannedStep) -> Advice:
    """Simulate possible changes of a whole step, and name the best.

    Stages can be moved if the trace has ``info["blocks"]``, the number of blocks of every stage, or
    ``info["split"]``, a list of the stages' lists of layers.
    """
    alternatives = Alternatives(trace, plan)
    now = alternatives.unchanged()
    moved, reordered = list(alternatives.moved()), list(alternatives.reordered())
    ranked = sorted([*moved, *reordered], key=lambda change: (change.makespan, change.memory))
    total = now.makespan or 1.0
    candidates = (
        min(moved, key=lambda change: change.makespan, default=now),
        # Of orders that are equally quick, the one that needs less memory.
        min(reordered, key=lambda change: (round(change.makespan / total, 3), change.memory), default=now),
    )
    proposed = tuple(change for change in candidates if 1 - change.makespan / total >= MIN_GAIN)
    sentence = " ".join(_sentence(now, change, is_measured(trace)) for change in proposed)
    slow = alternatives.slow_stage()
    if slow is not None and not any(change in moved for change in proposed):
        # A slow machine is worth a word, even if no block can be moved off it.
        sentence = f"{slow[0].upper()}{slow[1:]}. {sentence or _without_proposal(len(ranked))}"
    return Advice(sentence or _without_proposal(len(ranked)), proposed, (now, *ranked))


def _sentence(now: Change, change: Change, measured: bool) -> str:
    # A measured step's own idle share has irregular ops in it, and is no baseline of a simulation.
    baseline = (
        f"(simulated; the present order, simulated the same way, is {now.bubble:.1%} idle)"
        if measured
        else f"instead of {now.bubble:.1%} (simulated)"
    )
    gain = 1 - change.makespan / now.makespan
    words = change.words[0].upper() + change.words[1:]
    return f"{words}, the step would be {gain:.0%} shorter and {change.bubble:.1%} idle {baseline}."


def _without_proposal(simulated: int) -> str:
    if not simulated:
        return "No change was simulated: no other schedule of the catalogue fits these stages."
    if simulated == 1:
        return f"The one change that was simulated within the same memory does not make the step {MIN_GAIN:.0%} shorter."
    which = f"None of the {simulated} changes that were simulated within the same memory"
    return f"{which} makes the step {MIN_GAIN:.0%} shorter."


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
        proposed = () if self.advice is None else self.advice.proposed
        return [line for change in proposed for line in change.lines.of(self.trace.info.get(API))]

    @cached_property
    def over_plan(self) -> str:
        """A sentence that compares a measured step with its plan; empty if it has no plan or was simulated."""
        if self.plan is None or not self.measured:
            return ""
        return compare_with_plan(self.bubbles, bubbles(self.plan.trace))
