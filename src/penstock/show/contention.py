"""Slowdown of ops by ranks that compute beside them, as a trace shows it.

Ranks that share cores, caches or memory bandwidth slow each other down. A schedule that lets ranks wait less then makes
every op longer, and saves less time than a simulation with the present costs promises.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.schedule.ops import Kind
from penstock.trace.beside import time_beside
from penstock.trace.events import Activity, Trace

_OPS = tuple(Activity(kind) for kind in Kind)
_LEAST_OPS = 12
"""Fewest ops that say anything."""


@dataclass(frozen=True)
class Contention:
    """Length of ops as a function of the other ranks that compute meanwhile: 1 + slope × (others - usual).

    Attributes:
        slope: growth of an op's length with each rank that computes beside it, relative to its usual length; at least 0.
        usual: mean number of other ranks that computed beside an op in the trace.
    """

    slope: float = 0.0
    usual: float = 0.0

    def factor(self, others: float) -> float:
        """Return the length of ops beside a mean number of computing ranks, over that in the trace."""
        return max(0.1, 1.0 + self.slope * (others - self.usual))


def contention_of(trace: Trace) -> Contention:
    """Return the slowdown in a measured trace: the line through lengths of ops over ranks that computed beside them.

    Lengths are relative to the median of the same stage and kind of op. A trace with few ops, or ops that all had the same
    company, shows none.
    """
    work = trace.only(_OPS)
    if trace.info.get("source") != "measured" or trace.ranks < 2 or len(work) < _LEAST_OPS:
        return Contention()
    length = (work.end - work.start).astype(np.float64)
    others = others_beside(work)
    relative = np.ones(len(work))
    for stage, kind in np.unique(np.stack([work.stage, work.kind]), axis=1).T:
        same = (work.stage == stage) & (work.kind == kind)
        relative[same] = length[same] / max(float(np.median(length[same])), 1e-12)
    # Single ops that the system interrupted would turn the line.
    sound = (relative > 0.5) & (relative < 2.0) & (length > 0)
    usual = float(np.average(others, weights=np.maximum(length, 1e-12)))
    spread = others[sound] - others[sound].mean() if sound.any() else np.zeros(0)
    if sound.sum() < _LEAST_OPS or float(spread @ spread) < 1e-3 * sound.sum():
        return Contention(0.0, usual)
    slope = float(spread @ relative[sound]) / float(spread @ spread)
    return Contention(max(0.0, slope), usual)


def others_beside(work: Trace) -> npt.NDArray[np.float64]:
    """Return the mean number of other ranks that compute during each op, shape (ops,)."""
    length = (work.end - work.start).astype(np.float64)
    beside = time_beside(work, np.arange(len(work)), np.ones(len(work)))
    return np.where(length > 0, beside / np.maximum(length, 1e-12), 0.0)
