"""The handcrafted zero-bubble schedules with a loop placement: backwards split in two, weights a little later.

All three have one shape. A rank warms up with some forwards. Then forward and input-gradient half take turns. From the
`delay`-th of these halves on, each is followed by the oldest weight half that waits.
"""

from __future__ import annotations

import numpy as np

from penstock.schedule.families.full_backward import chosen_group, visits
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Columns, Schedule, plain_columns


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 (2401.10241, section 2.1): 1F1B's memory, a third of its bubble when F = B = W.

    Rank r warms up with p-1-r forwards and holds back r weight halves. The bubble is (p-1)(F+B-W) from m = p on; every
    rank holds at most p activations until their W.

    ::

        2 ranks, 3 microbatches
        rank 0  0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    p, m = ranks, microbatches
    return Schedule.from_columns(
        "zb-h1", Placement.loop(p), m, [_one_chunk(r, m, min(p - 1 - r, m), r) for r in range(p)]
    )


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H2 (2401.10241, section 2.2): twice 1F1B's memory, no bubble within a rank when F = B = W.

    Rank r warms up with 2(p-1-r) forwards and holds back 2r weight halves. Ranks start and end one after the other: the
    longest rank idles (p-1)(F+B-2W), if that is positive, the makespan has the staircase (p-1)F besides. Every rank
    holds at most 2p-1 activations until their W.

    ::

        2 ranks, 4 microbatches
        rank 0  0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1  1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """
    p, m = ranks, microbatches
    return Schedule.from_columns(
        "zb-h2", Placement.loop(p), m, [_one_chunk(r, m, min(2 * (p - 1 - r), m), 2 * r) for r in range(p)]
    )


def interleaved_zb(
    ranks: int, microbatches: int, virtual_stages: int = 2, group_size: int | None = None
) -> Schedule:
    """Interleaved 1F1B with split backwards (torch's ScheduleInterleavedZeroBubble, the 1p limit).

    Stage s lives on rank s mod p. Forwards go through groups of N microbatches, chunk by chunk; rank r warms up with
    (v-1)N + p-1-r of them and holds back r weight halves. With F = B = W the bubble is (p-1)F/v, and every rank holds
    (v-1)N + p activations until their W. With one virtual stage it is ZB-H1.
    N is chosen as in `interleaved_1f1b`.

    ::

        2 ranks, 2 microbatches, 2 virtual stages
        rank 0  0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        rank 1  1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    p, m, v = ranks, microbatches, virtual_stages
    n = chosen_group("interleaved-zb", p, m, group_size)
    order, chunks = visits(m, v, n)
    columns = []
    for r in range(p):
        position, kinds = _delayed(m * v, min((v - 1) * n + p - 1 - r, m * v), r)
        chunk = np.where(kinds == Kind.F, chunks[position], v - 1 - chunks[position])
        columns.append(plain_columns(chunk * p + r, kinds, order[position]))
    return Schedule.from_columns("interleaved-zb", Placement.loop(p, v), m, columns, {"group_size": n})


def _one_chunk(stage: int, microbatches: int, warm_up: int, delay: int) -> Columns:
    position, kinds = _delayed(microbatches, warm_up, delay)
    return plain_columns(stage, kinds, position)


def _delayed(count: int, warm_up: int, delay: int) -> tuple[np.ndarray, np.ndarray]:
    """Return visits and kinds in the order that the module's docstring describes, each of shape (3·count,)."""
    each = np.arange(count)
    # A round has three slots, F, I and W. The warm-up shifts forwards to earlier rounds, the delay weights to later ones.
    when = np.concatenate([3 * (each - warm_up), 3 * each + 1, 3 * (each + delay) + 2])
    order = np.argsort(when, kind="stable")
    kinds = np.repeat(np.array([Kind.F, Kind.I, Kind.W], np.int8), count)
    return np.tile(each, 3)[order], kinds[order]
