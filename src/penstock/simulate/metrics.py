"""What a simulation comes to: the figures people compare schedules by.

The literature has two measures of time, and a percentage means nothing without saying which it is of. The *makespan* runs
from the first start to the last end of all ranks: what a step costs when the optimizer waits for every rank. The *longest*
is the largest time from a rank's own first start to its own last end: what a step costs when ranks may start the next one
without waiting (the cost of the zero-bubble paper, 2401.10241).
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
from penstock.trace.memory_curve import peaks


@dataclass(frozen=True, eq=False)
class Metrics:
    """The figures of one simulated schedule; times in the costs' unit.

    Attributes:
        schedule: its name.
        ranks, stages, microbatches: its counts.
        makespan: the last end minus the first start.
        longest: the largest last end minus first start of one rank.
        lower_bound: no schedule with this placement and these costs has a smaller makespan.
        busy: computing time of every rank, shape (ranks,).
        bubble: makespan - busy of every rank.
        idle: the bubble of every rank by cause; see `penstock.trace.bubbles`.
        peak_activations: int64, the most activations every rank holds, in chunks (a microbatch on a stage), freed at W.
    """

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    makespan: Any
    longest: Any
    lower_bound: Any
    busy: Table
    bubble: Table
    idle: Mapping[str, Table]
    peak_activations: npt.NDArray[np.int64]

    @property
    def bubble_of_makespan(self) -> float:
        """The idle share of ranks × makespan."""
        return _share(float(self.bubble.sum()), float(self.makespan) * self.ranks)

    @property
    def bubble_of_longest(self) -> float:
        """(longest - work) / longest with the busiest rank's work: the zero-bubble paper's bubble rate."""
        return _share(float(self.longest - self.busy.max()), float(self.longest))

    @property
    def over_bound(self) -> float:
        """How much longer the makespan is than the lower bound, as a share of the bound; rounding is no time gained."""
        return max(0.0, _share(float(self.makespan - self.lower_bound), float(self.lower_bound)))

    def as_dict(self) -> dict[str, Any]:
        """Everything as what JSON can hold."""
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
    """Sum up a simulation of `schedule` with `costs`."""
    split = bubbles(trace)
    return Metrics(
        schedule.name,
        schedule.ranks,
        schedule.stages,
        schedule.microbatches,
        split.makespan,
        longest(trace),
        bound_of(schedule, costs).makespan,
        split.busy,
        split.makespan - split.busy,
        split.idle,
        peaks(trace) if trace.info.get("held") == "chunks" else peak(schedule),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
