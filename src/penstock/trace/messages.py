"""Messages and memory of a trace: producers of the inputs of ops, time on the way, and what a rank holds over time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError
from penstock.trace.events import Activity, Trace


def producers(trace: Trace) -> npt.NDArray[np.int64]:
    """Return for every event the row that produced its input, int64; -1 if it has none in the trace.

    A forward receives the activation of the stage before, a backward or its input half the gradient of the stage after,
    each of the same microbatch. If the producer is on another rank, there was a message.
    """
    source = np.full(len(trace), -1, np.int64)
    stages, microbatches = int(trace.stage.max(initial=-1)) + 1, int(trace.microbatch.max(initial=-1)) + 1
    usable = (trace.stage >= 0) & (trace.microbatch >= 0)
    backward = (trace.kind == Activity.B) | (trace.kind == Activity.I)
    for mask, step in ((trace.kind == Activity.F, -1), (backward, 1)):
        rows = np.flatnonzero(mask & usable)
        # With a row of -1 before the first stage and one after the last, which have no neighbour there.
        table = np.full((stages + 2, microbatches), -1, np.int64)
        table[trace.stage[rows] + 1, trace.microbatch[rows]] = rows
        source[rows] = table[trace.stage[rows] + 1 + step, trace.microbatch[rows]]
    return source


def message_delays(trace: Trace) -> npt.NDArray[np.float64]:
    """Return the time from the end of an op to the start of each op on another rank that waited for it."""
    giver = producers(trace)
    taker = np.flatnonzero(giver >= 0)
    taker = taker[trace.rank[giver[taker]] != trace.rank[taker]]
    sent = trace.end[giver[taker]]
    first = (taker == 0) | (trace.rank[taker - 1] != trace.rank[taker])
    waited = first | (trace.end[taker - 1] <= sent)
    delays: npt.NDArray[np.float64] = (trace.start[taker] - sent)[waited].astype(np.float64)
    return delays


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
