"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

import numpy as np

from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule, plain_columns


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """GPipe (1811.06965), with the backwards in the order of the forwards, as torch runs them.

    The bubble is (p-1)(F+B); every rank holds all m activations.

    ::

        2 ranks, 3 microbatches
        rank 0  0F0 0F1 0F2 0B0 0B1 0B2
        rank 1  1F0 1F1 1F2 1B0 1B1 1B2
    """
    each = np.arange(microbatches)
    kinds = np.repeat([Kind.F, Kind.B], microbatches)
    return Schedule.from_columns(
        "gpipe",
        Placement.loop(ranks),
        microbatches,
        [plain_columns(r, kinds, np.tile(each, 2)) for r in range(ranks)],
    )
