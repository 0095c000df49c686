"""The trace of one step, joined from the traces that processes recorded of their own ranks, by their clocks.

Clocks are aligned by barriers that all processes passed. No process leaves a barrier before all have entered it. So no
process leaves before another enters, which bounds the difference of their clocks from both sides, whatever the network
does. The tightest bounds over many barriers count. This is the round trip of NTP (RFC 5905, section 8), with a barrier in
place of a reply.

Processes of one machine read one clock. They have one offset, and its bounds come from the last process to enter and the
first to leave: on a long link the other processes add the time that the barrier's messages take among them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import DataError
from penstock.trace.events import COLUMNS, Activity, Trace


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


Seconds = npt.NDArray[np.float64]


class Alignment(NamedTuple):
    """Offsets that turn every process's clock into the first one's."""

    offset: Seconds  # seconds to add to each clock, shape (processes,); 0 for the first
    error: Seconds  # largest error of `offset`, seconds, shape (processes,)


def align(met: npt.ArrayLike, clocks: Sequence[Hashable] | None = None) -> Alignment:
    """Return the offsets of clocks that run equally fast.

    Args:
        met: times at which every process entered and left each barrier, on its clock, shape (processes, barriers, 2).
        clocks: identifier of every process's clock; equal for processes that read the same one (default: all differ).
    """
    times = np.asarray(met, np.float64)
    if times.ndim != 3 or 0 in times.shape or times.shape[2] != 2 or (times[..., 1] < times[..., 0]).any():
        raise DataError(
            f"aligning clocks takes the times at which every process entered and later left every barrier, not an "
            f"array of shape {times.shape}"
        )
    names = list(range(len(times)) if clocks is None else clocks)
    members = {name: [n for n, other in enumerate(names) if other == name] for name in names}
    entered = np.stack([times[members[name], :, 0].max(axis=0) for name in names])
    left = np.stack([times[members[name], :, 1].min(axis=0) for name in names])
    # At every barrier left + offset >= entered[0] and left[0] >= entered + offset.
    lower = (entered[0] - left).max(axis=1)
    upper = (left[0] - entered).min(axis=1)
    offset, error = (lower + upper) / 2, np.abs(upper - lower) / 2
    offset[members[names[0]]] = error[members[names[0]]] = 0.0
    return Alignment(offset, error)


def present(trace: Trace) -> list[int]:
    """Return the ranks that have events, ascending."""
    return [int(rank) for rank in np.unique(trace.rank)]


def join(parts: Sequence[Trace], clocks: Alignment | None = None) -> Trace:
    """Join the parts of a step, which processes of one pipeline recorded, no rank in two of them.

    ``info["origin"]`` of a part is the time from which it counts, in seconds on its process's clock (default 0);
    without `clocks` the parts share one clock. The result counts from its first event. Its `info` is the first
    part's, with ``ranks_present``, ``origin`` on the first part's clock, ``clock_error``, the largest error in
    seconds between the times of two ranks, and ``whole_backward`` of all parts.
    """
    ranks = [rank for part in parts for rank in present(part)]
    offsets = np.zeros(len(parts)) if clocks is None else clocks.offset
    began = [
        part.info.get("origin", 0.0) + float(offset) for part, offset in zip(parts, offsets, strict=True)
    ]
    error = 0.0 if clocks is None else float(clocks.error.max())
    info: dict[str, object] = {"ranks_present": sorted(ranks), "clock_error": error}
    if stages := {name for part in parts for name in part.info.get("whole_backward", ())}:
        info["whole_backward"] = sorted(stages)
    return _concatenated(parts, began, info)


def _concatenated(parts: Sequence[Trace], began: Sequence[float], info: dict[str, object]) -> Trace:
    """Concatenate traces that began at given times."""
    lengths = [len(part) for part in parts]
    firsts = [at + float(part.start.min()) for at, part in zip(began, parts, strict=True) if len(part)]
    origin = min(firsts, default=0.0)
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    shift = np.repeat([at - origin for at in began], lengths)
    columns["start"], columns["end"] = columns["start"] + shift, columns["end"] + shift
    held = [part.held for part in parts if part.held is not None]
    # A stable sort keeps the events of a rank in the order of their part.
    order = np.argsort(columns["rank"], kind="stable")
    return Trace(
        ranks=parts[0].ranks,
        **{name: column[order] for name, column in columns.items()},
        held=np.concatenate(held)[order] if len(held) == len(parts) else None,
        info={**parts[0].info, **info, "origin": origin},
    )
