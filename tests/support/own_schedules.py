"""Schedule functions as users write them."""

from __future__ import annotations

from penstock.base.errors import ScheduleError
from penstock.schedule.families import build_schedule
from penstock.schedule.ops import Kind, Op, Pair
from penstock.schedule.schedule import Schedule


def waiting(ranks, microbatches, hold=1):
    """1F1B whose weight gradients wait for `hold` more microbatches."""
    orders = []
    for rank in range(ranks):
        warm_up = min(microbatches, ranks - rank)
        ops = [f"{rank}F{j}" for j in range(warm_up)]
        for j in range(microbatches):
            ops.append(f"{rank}I{j}")
            if j >= hold:
                ops.append(f"{rank}W{j - hold}")
            if warm_up + j < microbatches:
                ops.append(f"{rank}F{warm_up + j}")
        ops += [f"{rank}W{j}" for j in range(max(0, microbatches - hold), microbatches)]
        orders.append(ops)
    return orders


def folded(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """GPipe on a V, from a Schedule."""
    if virtual_stages != 2:
        raise ScheduleError(f"a V has two stages per rank, not {virtual_stages}")
    return build_schedule("zb-v", ranks, microbatches)


def by_ops(ranks, microbatches):
    """GPipe, one text or one list of ops per rank, from a generator."""
    for rank in range(ranks):
        forwards = [Op(rank, Kind.F, j) for j in range(microbatches)]
        if rank % 2:
            yield " ".join([*map(str, forwards), *(f"{rank}B{j}" for j in range(microbatches))])
        else:
            yield [*forwards, *(Op(rank, Kind.B, j) for j in range(microbatches))]


def with_pairs(ranks, microbatches):
    """1F1B on one rank, in pairs."""
    first = [Op(0, Kind.F, 0)]
    pairs = [Pair(Op(0, Kind.F, j), Op(0, Kind.B, j - 1)) for j in range(1, microbatches)]
    return [[*first, *pairs, Op(0, Kind.B, microbatches - 1)]]


def reversed_backward(ranks, microbatches):
    """GPipe whose backwards run from the last microbatch to the first."""
    return [
        [f"{r}F{j}" for j in range(microbatches)] + [f"{r}B{j}" for j in reversed(range(microbatches))]
        for r in range(ranks)
    ]


def split_from_six(ranks: int, microbatches: int) -> Schedule:
    """1F1B, which splits its backwards where there are many microbatches."""
    return build_schedule("1f1b" if microbatches < 6 else "zb-h1", ranks, microbatches)


def divides_by_zero(ranks, microbatches):
    return [[f"{rank}F{1 // 0}"] for rank in range(ranks)]


def refuses(ranks, microbatches):
    raise ValueError(f"{ranks} ranks are too few")


def without_last_weight(ranks, microbatches):
    return [ops[:-1] for ops in waiting(ranks, microbatches)]
