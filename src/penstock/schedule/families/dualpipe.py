"""DualPipe and DualPipeV: a forward and a backward run as one fused pair and hide each other's communication.

Both have the same eight phases. Chunk 0 of a rank is the one that a microbatch from the near end reaches first, chunk 1 the
other. `near` is the rank's distance from that end and `depth` the number of ranks from end to turn.
"""

from __future__ import annotations

from penstock.base.errors import ScheduleError
from penstock.schedule.families.phases import PatternOp, Phase, phased
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule

_F = (PatternOp(Kind.F, 0), PatternOp(Kind.F, 1))
_B = (PatternOp(Kind.B, 0), PatternOp(Kind.B, 1))
_I = (PatternOp(Kind.I, 0), PatternOp(Kind.I, 1))
_W = PatternOp(Kind.W)
_F0_B1 = (PatternOp(Kind.F, 0, True), _B[1])
_F1_B0 = (PatternOp(Kind.F, 1, True), _B[0])


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """DualPipe (deepseek-ai/DualPipe): two pipes in opposite directions, every stage on two ranks.

    Rank r holds stages r and p-1-r. The first half of the microbatches enters at rank 0, the second at rank p-1, and
    the gradients of the two copies of a stage are summed. From m = 2p on, the bubble is (p/2-1)(F&B + B+W - 3W) with
    F&B the time of a pair; every rank holds at most p+1 activations.

    The rule is made for an even number of ranks and an even m of at least 2p; from a shorter step the ops of the
    missing microbatches are left out.

    ::

        2 ranks, 4 microbatches
        rank 0  0F0 1F2 0F1 1B2 (1F3;0B0)OVERLAP_F_B 1B3 0I1 0W1
        rank 1  0F2 1F0 0F3 1B0 (1F1;0B2)OVERLAP_F_B 1B1 0I3 0W3
    """
    p, m = ranks, microbatches
    if p % 2:
        raise ScheduleError(f"dualpipe needs an even number of ranks, got {p}; dualpipe-v takes any number")
    down, up = (m + 1) // 2, m // 2
    columns = []
    for r in range(p):
        near = min(r, p - 1 - r)
        stages = (near, p - 1 - near)
        # The phases need 2·depth microbatches a direction; `phased` drops the ones that a shorter step lacks.
        phases = _eight_phases(near, p // 2, max(p, down))
        if r < p // 2:
            columns.append(phased(phases, stages, (down, up), (0, down), weights_in_turn=True))
        else:
            columns.append(phased(phases, stages, (up, down), (down, 0), weights_in_turn=True))
    return Schedule.from_columns("dualpipe", Placement.two_way(p), m, columns)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV (deepseek-ai/DualPipe; torch's ScheduleDualPipeV): DualPipe cut in half and folded to a V.

    Rank r holds stages r and 2p-1-r, and no stage has a copy. From m = 2p on, the bubble is (p-1)(f&b + b+w - 3w) with
    a chunk's f, b, w half a rank's; every rank holds at most 2p+1 activations of half a stage's size.

    The rule is made for an m of at least 2p; from a shorter step the ops of the missing microbatches are left out.

    ::

        2 ranks, 4 microbatches
        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B 3B2
                (3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3
        rank 1  1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B
                (2F3;1B1)OVERLAP_F_B 2B2 1B2 2I3 1I3 2W3 1W3
    """
    p, m = ranks, microbatches
    columns = [
        phased(_eight_phases(r, p, max(2 * p, m)), (r, 2 * p - 1 - r), (m, m), weights_in_turn=True)
        for r in range(p)
    ]
    return Schedule.from_columns("dualpipe-v", Placement.waves(p), m, columns)


def _eight_phases(near: int, depth: int, count: int) -> list[Phase]:
    """Return the phases of one rank for `count` microbatches a direction, at least 2·depth."""
    inner = depth - near - 1
    steady = count - 2 * depth + near + 1
    phases: list[Phase] = [
        (2 * inner, [_F[0]]),
        (near + 1, [_F[0], _F[1]]),
        (inner, [_I[1], _W, _F[1]]),
    ]
    if inner == 0:
        # On the rank where the pipes turn, the first pair would wait for itself.
        phases.append((1, [_F[0], _B[1], *_F1_B0]))
        steady -= 1
    phases += [
        (steady, [*_F0_B1, *_F1_B0]),
        (inner, [_B[1], *_F1_B0]),
    ]
    # The first of the backwards run whole; later ones leave their W to fill the drain.
    full = (near + 1) // 2
    phases += [
        (full, [_B[1], _B[0]]),
        (1, [_I[1] if near % 2 else _B[1], _I[0]]),
        (near - full, [_I[1], _I[0]]),
    ]
    return [*phases, (inner, [_W, _I[0]]), (near + 1, [_W])]
