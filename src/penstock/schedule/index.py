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
    kind = schedule.kind

    def table(mask: np.ndarray) -> IntColumn:
        rows = np.flatnonzero(mask).astype(np.int32)
        found = np.full(shape, -1, np.int32)
        found[schedule.stage[rows], schedule.microbatch[rows]] = rows
        return found

    has_weight = bool((kind == Kind.W).any())
    return Index(
        table(kind == Kind.F),
        table((kind == Kind.B) | (kind == Kind.I)),
        table(kind == Kind.W) if has_weight else None,
    )


def links(schedule: Schedule, where: Index) -> tuple[IntColumn, IntColumn]:
    """Return (source, target): for every row the row whose hand-over it takes, and the row that takes its own.

    -1 where there is none. The schedule must be complete.
    """
    source = np.full(len(schedule), -1, np.int32)
    target = np.full(len(schedule), -1, np.int32)
    for taker, giver in (
        (where.forward[1:], where.forward[:-1]),
        (where.backward[:-1], where.backward[1:]),
    ):
        real = (taker >= 0) & (giver >= 0)
        source[taker[real]] = giver[real]
        target[giver[real]] = taker[real]
    return source, target


def rank_column(schedule: Schedule) -> IntColumn:
    """The rank of every row, int32, shape (ops,)."""
    return np.repeat(np.arange(schedule.ranks, dtype=np.int32), np.diff(schedule.offsets))
