"""Where every op of a schedule stands, and which op waits for which.

Data dependencies between ranks are all of one form: an op takes what one other op hands over.

    F(s, j)    takes the output of        F(s-1, j)
    B|I(s, j)  takes the gradient from    B|I(s+1, j)     (on the last stage: its own loss)

The rest (B|I after F, W after I, of the same stage and microbatch) never crosses ranks and is a matter
of the rank's own order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.schedule.ops import Kind
from penstock.schedule.schedule import IntColumn, Schedule


@dataclass(frozen=True, eq=False)
class Index:
    """Tables of shape (stages, microbatches) with the row of an op, -1 where there is none.

    Attributes:
        forward: rows of F.
        backward: rows of B or I, the op that yields the gradient of the stage's input.
        weight: rows of W; None if the schedule has none.
    """

    forward: IntColumn
    backward: IntColumn
    weight: IntColumn | None


def index(schedule: Schedule) -> Index:
    """Find every op. Of an op that stands twice the later row is kept; `check` reports it."""
    shape = (schedule.stages, schedule.microbatches)
    forward, backward = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    weight = np.full(shape, -1, np.int32) if bool((schedule.kind == Kind.W).any()) else None
    # Rank by rank, and in `links` stage by stage: what is worked with then fits a cache, whatever the schedule.
    for rank in range(schedule.ranks):
        first = schedule.rows(rank).start
        stage, kind, microbatch, _ = schedule.columns(rank)
        steps = [(forward, kind == Kind.F), (backward, (kind == Kind.B) | (kind == Kind.I))]
        if weight is not None:
            steps.append((weight, kind == Kind.W))
        for table, mask in steps:
            rows = np.flatnonzero(mask)
            table[stage[rows], microbatch[rows]] = first + rows
    return Index(forward, backward, weight)


def links(schedule: Schedule, where: Index) -> tuple[IntColumn, IntColumn]:
    """Return (source, target): for every row the row whose hand-over it takes, and the row that takes its own.

    -1 where there is none. The schedule must be complete.
    """
    source = np.full(len(schedule), -1, np.int32)
    target = np.full(len(schedule), -1, np.int32)
    for s in range(schedule.stages - 1):
        for taker, giver in (
            (where.forward[s + 1], where.forward[s]),
            (where.backward[s], where.backward[s + 1]),
        ):
            real = np.flatnonzero((taker >= 0) & (giver >= 0))
            source[taker[real]] = giver[real]
            target[giver[real]] = taker[real]
    return source, target


def rank_column(schedule: Schedule) -> IntColumn:
    """The rank of every row, int32, shape (ops,)."""
    return np.repeat(np.arange(schedule.ranks, dtype=np.int32), np.diff(schedule.offsets))
