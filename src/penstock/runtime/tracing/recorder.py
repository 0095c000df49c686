"""A measured step as a Trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.runtime.executor import Executor
from penstock.runtime.tracing.clocks import Readings
from penstock.trace.events import Trace


def measured_trace(executors: Sequence[Executor]) -> Trace:
    """Join what the executors of one process recorded, on one clock. Waits for the GPUs on which they computed.

    Args:
        executors: of ranks that have run the same step.

    Returns:
        Times in seconds from the first op's start; ``info["origin"]`` is that moment on ``time.perf_counter``'s clock.
        ``info["whole_backward"]`` names the layers whose backward could not be split, if there are any.
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
    whole = [
        name for e in executors for stage in e.stages.values() for name in stage.split_checks.unsplit_layers
    ]
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
            **({"whole_backward": sorted(set(whole))} if whole else {}),
        },
    )


def _held(executor: Executor) -> npt.NDArray[np.int64]:
    """Bytes a rank holds after each of its ops: the op's stage as recorded, the rank's others as they were last."""
    rows = executor.program.schedule.rows(executor.rank)
    stages = executor.program.schedule.stage[rows]
    own = np.array(executor.records.held, np.int64)
    total = np.zeros(len(own), np.int64)
    for stage in np.unique(stages):
        at = np.flatnonzero(stages == stage)
        change = np.diff(own[at], prepend=0)
        total[at] += change
    return np.cumsum(total)
