"""What happened and when: the one record that simulator and executor both make.

Everything that shows, compares or attributes works on a Trace without knowing which of the two made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt


class Activity(IntEnum):
    """What an event was; the first five are the kinds of op, with the same numbers."""

    F = 0
    B = 1
    I = 2  # noqa: E741 - the field's letter for the input-gradient half
    W = 3
    R = 4
    SEND = 5
    RECV = 6
    REDUCE = 7
    OPTIMIZER = 8


@dataclass(frozen=True, eq=False)
class Trace:
    """Timed events of one step, as columns of equal length, sorted by rank and then by start.

    Attributes:
        ranks: number of ranks.
        rank, stage, microbatch: int32; stage and microbatch are -1 where they have no meaning.
        kind: int8, an `Activity`.
        start, end: when, in seconds (or in the integer ticks of an integer simulation), from the
            step's start.
        paired: bool; this event and the next are the halves of one fused pair and span the same time.
        held: int64, bytes (or chunks) of activations the rank holds right after the event; None if unknown.
        info: what is known besides: ``source`` ("simulated" or "measured"), ``schedule``, ...
    """

    ranks: int
    rank: npt.NDArray[np.int32]
    stage: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    microbatch: npt.NDArray[np.int32]
    start: npt.NDArray[np.generic]
    end: npt.NDArray[np.generic]
    paired: npt.NDArray[np.bool_]
    held: npt.NDArray[np.int64] | None = None
    info: Mapping[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rank)
