"""Round trip: no rank is bound to a stage, and groups of microbatches take their stages round robin over the ranks."""

from __future__ import annotations

import numpy as np

from penstock.base.counts import require_count
from penstock.base.errors import ScheduleError
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Columns, Schedule, plain_columns


def round_trip(
    ranks: int,
    microbatches: int,
    virtual_stages: int = 2,
    group_size: int | None = None,
    in_flight: int | None = None,
) -> Schedule:
    """Every rank holds every stage, and groups of microbatches take them round robin, after RoundPipe (2604.27085).

    So no rank is bound to a heavy stage, such as the last one with a model's head: over p groups every rank has every stage
    equally often. Stage s of a group runs on the s-th rank from the one where the group begins, forward and backward
    (RoundPipe recomputes, and may run them on two ranks). K groups of N microbatches begin together, p/K ranks apart: a
    round. The next round begins one rank further. A rank takes the stages of a round in ascending order and back, all
    microbatches of a group in a row: a rank comes to a stage's weights twice for N microbatches. The last stage runs
    each backward right after its forward, so that logits of one microbatch are held at a time.

    With equal stages, w = m/(K·N) whole rounds and N >= d = p/K, the bubble is
    (w(d-1)(F+B) - (w-1)min(B, (d-1)F))/v. With K = p and whole rounds there is none, whatever each stage costs. A rank holds
    at most K·v·N activations.

    K is the smallest divisor of p above 1 unless `in_flight` is given; it must divide p. Groups have at most `group_size`
    microbatches, or 2p/K unless it is given. There are as many rounds as that needs, and all groups differ by one at most;
    N is the largest.

    ::

        2 ranks, 4 microbatches, 2 virtual stages
        rank 0  0F0 0F1 1F2 1F3 2F0 2F1 3F2 3B2 3F3 3B3 2B0 2B1 1B2 1B3 0B0 0B1
        rank 1  0F2 0F3 1F0 1F1 2F2 2F3 3F0 3B0 3F1 3B1 2B2 2B3 1B0 1B1 0B2 0B3
    """
    p, m, v = ranks, microbatches, virtual_stages
    size, count = usual_groups(p, m)
    if in_flight is not None:
        require_count("round-trip: in_flight", in_flight, kind=ScheduleError)
        if p % in_flight:
            fit = ", ".join(str(k) for k in range(1, p + 1) if not p % k)
            raise ScheduleError(
                f"round-trip: in_flight must divide the {p} ranks, got {in_flight}; take one of {fit}"
            )
        size, count = _even(m, in_flight, 2 * p // in_flight), in_flight
    if group_size is not None:
        require_count("round-trip: group_size", group_size, most=m, kind=ScheduleError)
        size = _even(m, count, group_size)
    return Schedule.from_columns(
        "round-trip",
        Placement.on_all_ranks(p, v),
        m,
        [_rank(r, p, m, v, size, count) for r in range(p)],
        {"group_size": size, "in_flight": count},
    )


def usual_groups(ranks: int, microbatches: int) -> tuple[int, int]:
    """Return the microbatches of the largest group, N, and the groups in flight, K, if they are not chosen."""
    count = next((k for k in range(2, ranks + 1) if not ranks % k), 1)
    return _even(microbatches, count, 2 * ranks // count), count


def _even(microbatches: int, in_flight: int, most: int) -> int:
    """Return the size of the largest group where the rounds that groups of `most` need are divided evenly."""
    return -(-microbatches // (in_flight * _rounds(microbatches, in_flight, most)))


def _rounds(microbatches: int, in_flight: int, size: int) -> int:
    return -(-microbatches // (in_flight * size))


def _rank(
    rank: int, ranks: int, microbatches: int, virtual_stages: int, size: int, in_flight: int
) -> Columns:
    """Return one rank's list: round by round, stages in ascending order forward and back."""
    groups = in_flight * _rounds(microbatches, in_flight, size)
    turn, within = np.divmod(np.arange(microbatches) * groups // microbatches, in_flight)
    begin = within * (ranks // in_flight) + turn
    # Of every microbatch, the first of its stages on this rank; the others follow every p stages.
    first = (rank - begin) % ranks
    stage = (first + np.arange(virtual_stages)[:, None] * ranks).ravel()
    microbatch, turn = np.tile(np.arange(microbatches), virtual_stages), np.tile(turn, virtual_stages)
    last = ranks * virtual_stages - 1
    # The last stage's backward belongs to the same place as its forward, microbatch by microbatch.
    back = np.where(stage == last, last, 2 * last + 1 - stage)
    kinds = np.repeat(np.array([Kind.F, Kind.B], np.int8), len(stage))
    each = np.tile(microbatch, 2)
    order = np.lexsort((kinds, each, np.concatenate([stage, back]), np.tile(turn, 2)))
    return plain_columns(np.tile(stage, 2)[order], kinds[order], each[order])
