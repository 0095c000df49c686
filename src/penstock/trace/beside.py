"""Time during which ops of other ranks run at the same time as an op."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.trace.events import Trace


def time_beside(
    trace: Trace, rows: npt.NDArray[np.intp], weights: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the weighted seconds of other ranks' ops during each op."""
    start, end = trace.start[rows].astype(np.float64), trace.end[rows].astype(np.float64)
    total = np.zeros(len(rows))
    for rank in range(trace.ranks):
        mine = np.flatnonzero(trace.rank[rows] == rank)
        if not len(mine):
            continue
        mine = mine[np.argsort(start[mine], kind="stable")]
        times = np.maximum.accumulate(np.stack([start[mine], end[mine]], axis=1).ravel())
        spent = np.zeros(len(times))
        spent[1::2] = (end[mine] - start[mine]) * weights[mine]
        done = np.cumsum(spent)
        others = trace.rank[rows] != rank
        total[others] += np.interp(end[others], times, done) - np.interp(start[others], times, done)
    return total
