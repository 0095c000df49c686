"""The memory of a rank over time, from a trace with the memory held after every event."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError
from penstock.trace.events import Trace


class Curve(NamedTuple):
    """A step function of time."""

    time: npt.NDArray[Any]  # times at which the rank's memory changes, ascending, in the trace's unit
    held: npt.NDArray[np.int64]  # memory held from each time on, in the unit of the trace's `held`


def memory_curve(trace: Trace, rank: int) -> Curve:
    """Return the memory of one rank over time: events allocate at their start and free at their end."""
    column = _held(trace)
    if not 0 <= rank < trace.ranks:
        raise ConfigError(f"rank must be one of the trace's, 0..{trace.ranks - 1}, got {rank}")
    rows = trace.rank_slices()[rank]
    after = column[rows]
    change = np.diff(after, prepend=np.int64(0))
    time = np.where(change > 0, trace.start[rows], trace.end[rows])
    changes = change != 0
    return Curve(time[changes], after[changes])


def peaks(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the peak memory of every rank, int64, shape (ranks,)."""
    column = _held(trace)
    return np.array([column[rows].max(initial=0) for rows in trace.rank_slices()], np.int64)


def _held(trace: Trace) -> npt.NDArray[np.int64]:
    if trace.held is None:
        raise ConfigError("this trace does not say what the ranks hold")
    return trace.held
