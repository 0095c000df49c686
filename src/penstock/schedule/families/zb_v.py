"""ZB-V: zero bubble on a V, in 1F1B's memory."""

from __future__ import annotations

from penstock.schedule.families.phases import PatternOp, Phase, phased
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule

_F = (PatternOp(Kind.F, 0), PatternOp(Kind.F, 1))
_I = (PatternOp(Kind.I, 0), PatternOp(Kind.I, 1))
_W = (PatternOp(Kind.W, 0), PatternOp(Kind.W, 1))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Handcrafted ZB-V (2401.10241, section 6; torch's ScheduleZBVZeroBubble).

    Rank r holds stages r and 2p-1-r. With F = B = W no rank idles between its first and its last op, and from m = 2p-1
    on the makespan exceeds the work by the (p-1)F/2 that it takes the first microbatch to reach the last rank. Every
    rank holds at most 2p activations of half a stage's size.

    ::

        2 ranks, 3 microbatches
        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        rank 1  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    p, m = ranks, microbatches
    n = max(2 * p - 1, m)
    last = _F[1], _I[1], _W[1]
    columns = []
    for r in range(p):
        both = n - 2 * p + r + 1
        phases: list[Phase] = [
            (2 * (p - r) - 1, [_F[0]]),
            (r, [_F[1], _F[0]]),
            (p - r, last),
            (both, [_F[0], _I[0], _W[0], *last]),
            (n - p - both, [_I[0], _W[0], *last]),
            (r, [_I[0], _I[1]]),
            (p - r, [_I[0], _W[0]]),
            (r, [_W[1]]),
            (r, [_W[0]]),
        ]
        columns.append(phased(phases, (r, 2 * p - 1 - r), (m, m)))
    return Schedule.from_columns("zb-v", Placement.waves(p), m, columns)
