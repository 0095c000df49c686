"""Which op of a trace gave what another one took."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.trace.events import Activity, Trace


def givers(trace: Trace) -> npt.NDArray[np.int64]:
    """For every event the row of the op whose result it took, int64; -1 if it took nothing, or the trace has no such op.

    A forward takes the activation of the stage before, a backward or its input half the gradient of the stage after, each
    of the same microbatch. Whoever takes from another rank got a message.
    """
    found = np.full(len(trace), -1, np.int64)
    stages, microbatches = int(trace.stage.max(initial=-1)) + 1, int(trace.microbatch.max(initial=-1)) + 1
    usable = (trace.stage >= 0) & (trace.microbatch >= 0)
    backward = (trace.kind == Activity.B) | (trace.kind == Activity.I)
    for of_kind, step in ((trace.kind == Activity.F, -1), (backward, 1)):
        rows = np.flatnonzero(of_kind & usable)
        table = np.full((stages + 2, microbatches), -1, np.int64)
        table[trace.stage[rows] + 1, trace.microbatch[rows]] = rows
        found[rows] = table[trace.stage[rows] + 1 + step, trace.microbatch[rows]]
    return found
