"""Several steps in a row without a barrier: a rank begins its next step after its own last op and its own update.

The zero-bubble paper (2401.10241, section 4) shows how an optimizer can do without that barrier. A rank that finishes early
then runs the first forwards of the next step while other ranks still drain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.schedule.program import Program, lower
from penstock.schedule.schedule import Columns, Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import busy, longest, makespan
from penstock.trace.events import Activity, Trace


@dataclass(frozen=True, eq=False)
class StepsInARow:
    """Several simulated steps in a row; times in the costs' unit.

    Attributes:
        steps: number of steps.
        program: the program of all of them; microbatches are numbered through.
        trace: events of all steps, with an optimizer event after each rank's ops of a step.
        flowing: time of a step without a barrier: the mean distance between the ends of two steps.
        barrier: time of a step if all ranks wait for each other: the makespan of one step, and the update.
        longest: the longest span of one rank in one step, and the update; no step can take less in this order.
        work: computing time of the busiest rank in one step, its update included.
    """

    steps: int
    program: Program
    trace: Trace
    flowing: Any
    barrier: Any
    longest: Any
    work: Any

    @property
    def gain(self) -> float:
        """Share of the step that flowing saves."""
        return 1.0 - float(self.flowing) / float(self.barrier) if self.barrier else 0.0

    def as_dict(self) -> Mapping[str, Any]:
        """Return the figures as values that JSON can represent."""
        times = {
            name: np.asarray(getattr(self, name)).item() for name in ("flowing", "barrier", "longest", "work")
        }
        return {"steps": self.steps, **times, "gain": self.gain}


def simulate_steps(schedule: Schedule, costs: Costs, steps: int, update: float | int = 0) -> StepsInARow:
    """Simulate several steps of a schedule in a row.

    Args:
        schedule: the schedule of one step, without deadlocks.
        costs: costs of ops and messages.
        steps: number of steps, at least 2.
        update: seconds of a rank's optimizer (default 0).

    Raises:
        ConfigError: if there are fewer than 2 steps, or the update takes less than no time.
    """
    if steps < 2 or update < 0:
        raise ConfigError(f"steps must be at least 2 and update at least 0 seconds, got {steps} and {update}")
    once = simulate(lower(schedule), costs)
    program = lower(repeat(schedule, steps))
    pause = _pauses(schedule, steps, update)
    trace = simulate(program, costs, pause=pause)
    ends = _ends(trace, schedule.microbatches, steps) + update
    finish = ends.max(axis=0)
    flowing = finish[-1] - finish[0]
    whole = np.issubdtype(flowing.dtype, np.integer) and flowing % (steps - 1) == 0
    return StepsInARow(
        steps,
        program,
        _with_updates(trace, ends, update, steps),
        flowing // (steps - 1) if whole else flowing / (steps - 1),
        makespan(once) + update,
        longest(once) + update,
        busy(once).max() + update,
    )


def repeat(schedule: Schedule, steps: int) -> Schedule:
    """Return a schedule's ops several times in a row; microbatches are numbered through."""
    columns = []
    for rank in range(schedule.ranks):
        stage, kind, microbatch, paired = schedule.columns(rank)
        numbers = [microbatch + step * schedule.microbatches for step in range(steps)]
        columns.append(
            Columns(
                np.tile(stage, steps),
                np.tile(kind, steps),
                np.concatenate(numbers).astype(np.int32),
                np.tile(paired, steps),
            )
        )
    return Schedule.from_columns(
        schedule.name, schedule.placement, steps * schedule.microbatches, columns, schedule.options
    )


def _pauses(schedule: Schedule, steps: int, update: float | int) -> npt.NDArray[Any] | None:
    """Return how long a rank is busy before each op: with its update, before its first op of each step but the first."""
    if not update:
        return None
    pause = np.zeros(steps * len(schedule), np.asarray(update).dtype)
    for rank in range(schedule.ranks):
        rows = schedule.rows(rank)
        if count := rows.stop - rows.start:
            pause[steps * rows.start + count * np.arange(1, steps)] = update
    return pause


def _ends(trace: Trace, microbatches: int, steps: int) -> npt.NDArray[Any]:
    """Return when each rank ends its ops of each step, shape (ranks, steps)."""
    ends = np.zeros((trace.ranks, steps), trace.end.dtype)
    np.maximum.at(ends, (trace.rank, trace.microbatch // microbatches), trace.end)
    return ends


def _with_updates(trace: Trace, ends: npt.NDArray[Any], update: float | int, steps: int) -> Trace:
    """Return the trace with the optimizer's events, which end at `ends`, shape (ranks, steps)."""
    info = {**trace.info, "steps": steps}
    if not update:
        return replace(trace, info=info)
    count = ends.size
    last = np.searchsorted(trace.rank, np.arange(trace.ranks), side="right") - 1
    held = trace.held
    added = {
        "rank": np.repeat(np.arange(trace.ranks, dtype=np.int32), steps),
        "stage": np.full(count, -1, np.int32),
        "kind": np.full(count, Activity.OPTIMIZER, np.int8),
        "microbatch": np.full(count, -1, np.int32),
        "start": ends.ravel() - update,
        "end": ends.ravel(),
        "paired": np.zeros(count, np.bool_),
    }
    columns = {name: np.concatenate([getattr(trace, name), column]) for name, column in added.items()}
    # Between two steps a rank holds what it holds after its last op.
    holding = None if held is None else np.concatenate([held, np.repeat(held[last], steps)])
    order = np.lexsort((columns["end"], columns["start"], columns["rank"]))
    return Trace(
        trace.ranks,
        **{name: column[order] for name, column in columns.items()},
        held=None if holding is None else holding[order],
        info=info,
    )
