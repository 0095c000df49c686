"""Figures of a simulation by which schedules are compared.

The literature has two measures of time, and a percentage must say to which it refers. The *makespan* runs from the first
start to the last end over all ranks: the time of a step if the optimizer waits for every rank. The *longest* is the largest
time from one rank's first start to its last end: the time of a step if ranks may start the next one without waiting (the
cost of the zero-bubble paper, 2401.10241).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.schedule.memory import peak
from penstock.schedule.schedule import Schedule
from penstock.simulate.bounds import bound_of
from penstock.simulate.costs import Costs, Table
from penstock.trace.bubbles import bubbles, longest
from penstock.trace.events import Trace
from penstock.trace.messages import peaks


@dataclass(frozen=True, eq=False, kw_only=True)
class Metrics:
    """Figures of one simulated schedule; times in the costs' unit."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    makespan: Any  # last end minus first start
    longest: Any  # largest last end minus first start of one rank
    lower_bound: Any  # no schedule with this placement and these costs can beat it
    busy: Table  # computing time of every rank, shape (ranks,)
    bubble: Table  # makespan minus busy, shape (ranks,)
    idle: Mapping[str, Table]  # bubble of every rank by cause; see `penstock.trace.bubbles`
    # Peak, int64, of the activations of every rank in chunks (a microbatch on a stage), freed at W.
    peak_activations: npt.NDArray[np.int64]

    @property
    def bubble_of_makespan(self) -> float:
        """Idle share of ranks × makespan."""
        return _share(float(self.bubble.sum()), float(self.makespan) * self.ranks)

    @property
    def bubble_of_longest(self) -> float:
        """(longest - work) / longest with the busiest rank's work: the zero-bubble paper's bubble rate."""
        return _share(float(self.longest - self.busy.max()), float(self.longest))

    @property
    def over_bound(self) -> float:
        """Makespan beyond the lower bound, as a share of the bound; never negative, even by rounding."""
        return max(0.0, _share(float(self.makespan - self.lower_bound), float(self.lower_bound)))

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as values that JSON can represent."""
        return {
            "schedule": self.schedule,
            "ranks": self.ranks,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "makespan": np.asarray(self.makespan).item(),
            "longest": np.asarray(self.longest).item(),
            "lower_bound": np.asarray(self.lower_bound).item(),
            "busy": self.busy.tolist(),
            "bubble": self.bubble.tolist(),
            "bubble_causes": {cause: time.tolist() for cause, time in self.idle.items()},
            "bubble_of_makespan": self.bubble_of_makespan,
            "bubble_of_longest": self.bubble_of_longest,
            "over_bound": self.over_bound,
            "peak_activations": self.peak_activations.tolist(),
        }


def measure(schedule: Schedule, costs: Costs, trace: Trace) -> Metrics:
    """Return the figures of a simulation of `schedule` with `costs`."""
    split = bubbles(trace)
    return Metrics(
        schedule=schedule.name,
        ranks=schedule.ranks,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        makespan=split.makespan,
        longest=longest(trace),
        lower_bound=bound_of(schedule, costs).makespan,
        busy=split.busy,
        bubble=split.makespan - split.busy,
        idle=split.idle,
        peak_activations=peaks(trace) if trace.info.get("held") == "chunks" else peak(schedule),
    )


def _share(part: float, total: float) -> float:
    return part / total if total > 0 else 0.0
