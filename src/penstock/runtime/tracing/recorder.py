"""The trace of a measured step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.runtime.executor import Executor
from penstock.runtime.tracing.clocks import Readings
from penstock.trace.events import Trace


def measured_trace(executors: Sequence[Executor]) -> Trace:
    """Join the records of the executors of one process, on one clock; waits for their GPUs.

    Returns:
        The trace, with times in seconds from the first op's start; ``info["origin"]`` is that moment in seconds of
        ``time.perf_counter``. ``info["whole_backward"]`` names the layers whose backward could not be split, if any.
    """
    program = executors[0].program
    schedule = program.schedule
    rows = np.concatenate(
        [np.arange(schedule.rows(e.rank).start, schedule.rows(e.rank).stop) for e in executors]
    )
    readings = Readings()
    start = np.concatenate([readings.seconds(e.device, e.records.start) for e in executors])
    end = np.concatenate([readings.seconds(e.device, e.records.end) for e in executors])
    held = np.concatenate([_held(e) for e in executors])
    origin = start.min()
    unsplit = {
        name for e in executors for stage in e.stages.values() for name in stage.split_checks.unsplit_layers
    }
    return Trace(
        schedule.ranks,
        program.rank[rows],
        schedule.stage[rows],
        schedule.kind[rows],
        schedule.microbatch[rows],
        start - origin,
        end - origin,
        schedule.paired[rows],
        held,
        info={
            "source": "measured",
            "schedule": schedule.name,
            "ranks_present": [e.rank for e in executors],
            "origin": float(origin),
            **({"whole_backward": sorted(unsplit)} if unsplit else {}),
        },
    )


def _held(executor: Executor) -> npt.NDArray[np.int64]:
    """Return the bytes a rank holds after each of its ops, summed over its stages; each record is of the op's stage."""
    rows = executor.program.schedule.rows(executor.rank)
    stages = executor.program.schedule.stage[rows]
    held = np.array(executor.records.held, np.int64)
    changes = np.zeros(len(held), np.int64)
    for stage in np.unique(stages):
        ops = np.flatnonzero(stages == stage)
        changes[ops] += np.diff(held[ops], prepend=0)
    return np.cumsum(changes)
