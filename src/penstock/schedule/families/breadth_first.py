"""Breadth-first: every chunk takes all microbatches before the next chunk begins."""

from __future__ import annotations

import numpy as np

from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule, plain_columns


def breadth_first(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """Looped breadth-first (2211.05953): all forwards chunk by chunk, then all backwards from the last chunk.

    Stage s lives on rank s mod p. The bubble is (p-1)(F+B+W)/v, as interleaved 1F1B's, at the price of all m·v
    activations; with data parallelism, gradients of a chunk can be reduced while the next one runs. The backwards
    keep the order of the forwards here (torch's ScheduleLoopedBFS reverses it, with the same time and memory).

    ::

        2 ranks, 2 microbatches, 2 virtual stages
        rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1  1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    p, m, v = ranks, microbatches, virtual_stages
    down = np.arange(v)
    chunks = np.repeat(np.concatenate([down, down[::-1]]), m)
    kinds = np.repeat([Kind.F, Kind.B], v * m)
    each = np.tile(np.arange(m), 2 * v)
    return Schedule.from_columns(
        "breadth-first",
        Placement.loop(p, v),
        m,
        [plain_columns(chunks * p + r, kinds, each) for r in range(p)],
    )
