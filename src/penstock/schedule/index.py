"""The row of every op of a schedule, and the op that each one waits for.

All data dependencies between ranks have one form: an op receives the output of one other op.

    F(s, j)    receives the activation from  F(s-1, j)
    B|I(s, j)  receives the gradient from    B|I(s+1, j)     (on the last stage: from its loss)

The other dependencies (B|I after F, W after I, of the same stage and microbatch) never cross ranks; the order of the
rank's list meets them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.schedule.ops import Kind
from penstock.schedule.schedule import IntColumn, Schedule


@dataclass(frozen=True, eq=False)
class Index:
    """Row of every op, -1 where there is none; tables of shape (stages, microbatches)."""

    forward: IntColumn
    backward: IntColumn  # rows of B or I, the op that yields the gradient of the stage's input
    weight: IntColumn | None  # rows of W; None if the schedule has none


def index(schedule: Schedule) -> Index:
    """Return the row of every op; the last row of an op that appears twice, which `check` rejects."""
    shape = (schedule.stages, schedule.microbatches)
    forward, backward = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    weight = np.full(shape, -1, np.int32) if bool((schedule.kind == Kind.W).any()) else None
    # Rank by rank, and in `links` stage by stage, so that the working set fits a cache however large the schedule is.
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
    """Return for every row the row that produces its input and the row that consumes its output, -1 for none.

    The schedule must be complete.
    """
    source = np.full(len(schedule), -1, np.int32)
    target = np.full(len(schedule), -1, np.int32)
    for s in range(schedule.stages - 1):
        for consumer, producer in (
            (where.forward[s + 1], where.forward[s]),
            (where.backward[s], where.backward[s + 1]),
        ):
            exists = np.flatnonzero((consumer >= 0) & (producer >= 0))
            source[consumer[exists]] = producer[exists]
            target[producer[exists]] = consumer[exists]
    return source, target


def rank_column(schedule: Schedule) -> IntColumn:
    """Return the rank of every row, int32, shape (ops,)."""
    return np.repeat(np.arange(schedule.ranks, dtype=np.int32), np.diff(schedule.offsets))
