"""Backwards whose two halves ran as one op."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.trace.events import Activity, Trace


def merged_halves(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return which events are halves of a backward that may have run as one, shape (events,).

    No stage before the first needs its input gradient. Where the first stage's W follows its I at once, the executor runs
    one full backward as the I, and nothing as the W.
    """
    halves = np.zeros(len(trace), np.bool_)
    if len(trace):
        first = np.flatnonzero(
            (trace.kind[:-1] == Activity.I)
            & (trace.kind[1:] == Activity.W)
            & (trace.stage[:-1] == 0)
            & (trace.stage[1:] == 0)
            & (trace.rank[:-1] == trace.rank[1:])
            & (trace.microbatch[:-1] == trace.microbatch[1:])
        )
        halves[first] = halves[first + 1] = True
    return halves
