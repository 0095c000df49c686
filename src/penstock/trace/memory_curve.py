"""The memory curve of a rank: what it holds over time, from a trace that says what it holds after every event."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.trace.events import Trace


class Curve(NamedTuple):
    """A step function of time.

    Attributes:
        time: when the rank's memory changes, ascending, in the trace's unit.
        held: int64, what it holds from then on, in the unit of the trace's `held`.
    """

    time: npt.NDArray[Any]
    held: npt.NDArray[np.int64]


def memory_curve(trace: Trace, rank: int) -> Curve:
    """What one rank holds over time: an event takes memory when it starts and gives it back when it ends.

    Raises:
        ConfigError: the trace does not say what is held, or has no such rank.
    """
    column = _held(trace)
    if not 0 <= rank < trace.ranks:
        raise ConfigError(f"the trace has ranks 0..{trace.ranks - 1}, not {rank}")
    rows = trace.rank_slices()[rank]
    after = column[rows]
    change = np.diff(after, prepend=np.int64(0))
    time = np.where(change > 0, trace.start[rows], trace.end[rows])
    moved = change != 0
    return Curve(time[moved], after[moved])


def peaks(trace: Trace) -> npt.NDArray[np.int64]:
    """The most every rank ever holds, int64, shape (ranks,).

    Raises:
        ConfigError: the trace does not say what is held.
    """
    column = _held(trace)
    return np.array([column[rows].max(initial=0) for rows in trace.rank_slices()], np.int64)


def _held(trace: Trace) -> npt.NDArray[np.int64]:
    if trace.held is None:
        raise ConfigError("this trace does not say what the ranks hold")
    return trace.held
