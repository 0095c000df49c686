"""Alignment of the clocks of several processes by barriers that all of them passed.

No process leaves a barrier before all have entered it. So no process leaves before another enters, which bounds the
difference of their clocks from both sides, whatever the network does. The tightest bounds over many barriers count. This is
the round trip of NTP (RFC 5905, section 8), with a barrier in place of a reply.

Processes of one machine read one clock. They have one offset, and its bounds come from the last process to enter and the
first to leave: on a long link the other processes add the time that the barrier's messages take among them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import DataError

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
