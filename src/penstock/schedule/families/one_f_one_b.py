"""1F1B and eager 1F1B: a warm-up of forwards, then one forward one backward, then the rest of the backwards."""

from __future__ import annotations

import numpy as np

from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Columns, Schedule, plain_columns


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B (PipeDream-Flush, 2006.09503; DAPPLE): rank r warms up with p-1-r forwards.

    The bubble is (p-1)(F+B), as GPipe's; rank r holds at most p-r activations.

    ::

        2 ranks, 3 microbatches
        rank 0  0F0 0F1 0B0 0F2 0B1 0B2
        rank 1  1F0 1B0 1F1 1B1 1F2 1B2
    """
    return Schedule.from_columns(
        "1f1b",
        Placement.loop(ranks),
        microbatches,
        # Microbatch 0 comes back to rank r after p-1-r stages forward and as many backward; these forwards fill the wait.
        [alternating(r, microbatches, min(ranks - 1 - r, microbatches)) for r in range(ranks)],
    )


def eager_1f1b(ranks: int, microbatches: int) -> Schedule:
    """Eager 1F1B (2211.05322; Alpa's overlap-friendly schedule): as 1F1B, with 2(p-1-r) forwards to warm up.

    The bubble is 1F1B's, (p-1)(F+B), and stays so while a message takes up to half of F+B, because an activation is
    sent a whole step before it is needed; rank r holds at most 2(p-r)-1 activations.

    ::

        2 ranks, 4 microbatches
        rank 0  0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1  1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """
    return Schedule.from_columns(
        "eager-1f1b",
        Placement.loop(ranks),
        microbatches,
        [alternating(r, microbatches, min(2 * (ranks - 1 - r), microbatches)) for r in range(ranks)],
    )


def alternating(stage: int, microbatches: int, warm_up: int) -> Columns:
    """Return one stage's list: `warm_up` forwards, then forward and backward in turn, then the backwards left."""
    m, w = microbatches, warm_up
    kinds = np.empty(2 * m, np.int8)
    order = np.empty(2 * m, np.int32)
    steady = slice(w, 2 * m - w)
    kinds[:w], order[:w] = Kind.F, np.arange(w)
    kinds[steady][0::2], order[steady][0::2] = Kind.F, np.arange(w, m)
    kinds[steady][1::2], order[steady][1::2] = Kind.B, np.arange(m - w)
    kinds[2 * m - w :], order[2 * m - w :] = Kind.B, np.arange(m - w, m)
    return plain_columns(stage, kinds, order)
