"""A measured step as a Trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.runtime.executor import Executor
from penstock.trace.events import Trace


def measured_trace(executors: Sequence[Executor]) -> Trace:
    """Join what the executors of one process recorded; their clocks are one clock.

    Args:
        executors: of ranks that have run the same step.

    Returns:
        Times in seconds from the first op's start; ``info["origin"]`` is that moment on ``time.perf_counter``'s clock.
    """
    program = executors[0].program
    schedule = program.schedule
    rows = np.concatenate(
        [np.arange(schedule.rows(e.rank).start, schedule.rows(e.rank).stop) for e in executors]
    )
    start = np.concatenate([np.array(e.start) for e in executors])
    end = np.concatenate([np.array(e.end) for e in executors])
    origin = start.min()
    return Trace(
        schedule.ranks,
        program.rank[rows],
        schedule.stage[rows],
        schedule.kind[rows],
        schedule.microbatch[rows],
        start - origin,
        end - origin,
        schedule.paired[rows],
        info={
            "source": "measured",
            "schedule": schedule.name,
            "ranks_present": [e.rank for e in executors],
            "origin": float(origin),
        },
    )
