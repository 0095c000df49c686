"""The clocks of several processes made one, from moments at which all of them met.

In a meeting nobody leaves before everybody has come. So a process's leaving is never earlier than another's coming, which
bounds by how much their clocks differ from both sides, whatever the network does; of many meetings the tightest bounds
count. This is the round trip of NTP (RFC 5905, section 8), with a meeting in place of a reply.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import DataError

Seconds = npt.NDArray[np.float64]


class Alignment(NamedTuple):
    """What to add to every process's clock to read the first one's.

    Attributes:
        offset: seconds, shape (processes,); 0 for the first.
        error: how far `offset` can be off, seconds, shape (processes,).
    """

    offset: Seconds
    error: Seconds


def align(met: npt.ArrayLike) -> Alignment:
    """Find the offsets of clocks that run equally fast.

    Args:
        met: when every process came to each meeting and when it left, on its own clock: shape (processes, meetings, 2).

    Raises:
        DataError: there was no meeting, or someone left before it came.
    """
    times = np.asarray(met, np.float64)
    if times.ndim != 3 or 0 in times.shape or times.shape[2] != 2 or (times[..., 1] < times[..., 0]).any():
        raise DataError(
            f"aligning clocks takes a coming and a later leaving of every process in every meeting, not an array of "
            f"shape {times.shape}"
        )
    came, left = times[..., 0], times[..., 1]
    least = (came[0] - left).max(axis=1)
    most = (left[0] - came).min(axis=1)
    offset, error = (least + most) / 2, np.abs(most - least) / 2
    offset[0] = error[0] = 0.0
    return Alignment(offset, error)
