"""How many bytes of activations each rank holds after every op, as the schedule alone says.

A forward saves its activations; they are dropped by the full backward ``B``, or, when the backward is split, by the
weight half ``W`` (what the executor does) or already by the input half ``I`` (the accounting of the zero-bubble
paper, 2401.10241). From ``I`` to ``W`` something else may wait besides: the gradient that the weight half still needs.

With one byte a stage the same sums count activations in chunks, a chunk being one microbatch on one stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.errors import ScheduleError
from penstock.schedule.ops import Kind
from penstock.schedule.schedule import Schedule

FreedAt = Literal["B", "W"]
Bytes = npt.NDArray[np.int64]


def held(
    schedule: Schedule,
    saved: npt.ArrayLike = 1,
    waiting: npt.ArrayLike = 0,
    *,
    inputs: npt.ArrayLike = 0,
    freed_at: FreedAt = "W",
) -> Bytes:
    """What the rank of every row holds right after that row, int64, shape (ops,).

    In a fused pair the forward is counted first, so that the row of its forward shows the pair's most.

    Args:
        schedule: the ops; complete, or what no op frees stays.
        saved: bytes a forward saves for its backward, one number or one a stage.
        waiting: bytes that wait from ``I`` to ``W``, one number or one a stage.
        inputs: bytes of the stage's input, one number or one a stage: all that a forward keeps when a recompute
            (``R``) of the same microbatch rebuilds the rest.
        freed_at: where a split backward drops what the forward saved: "B", its input half, or "W".

    Raises:
        ScheduleError: bytes that are negative or not whole, or not one a stage.
    """
    save, wait, keep = (
        _whole(name, given, schedule.stages, "stage")
        for name, given in (("saved", saved), ("waiting", waiting), ("inputs", inputs))
    )
    change = np.zeros((len(Kind), schedule.stages), np.int64)
    change[Kind.F] = save
    change[Kind.B] = -save
    change[Kind.I] = wait - (save if freed_at == "B" else 0)
    change[Kind.W] = -wait - (save if freed_at == "W" else 0)
    change[Kind.R] = save - keep
    delta = change[schedule.kind, schedule.stage]
    if len(again := np.flatnonzero(schedule.kind == Kind.R)):
        recomputed = np.zeros((schedule.stages, schedule.microbatches), np.bool_)
        recomputed[schedule.stage[again], schedule.microbatch[again]] = True
        light = (schedule.kind == Kind.F) & recomputed[schedule.stage, schedule.microbatch]
        delta[light] = keep[schedule.stage[light]]
    total = np.cumsum(delta, out=delta)
    before = np.zeros(schedule.ranks, np.int64)
    starts = schedule.offsets[1:-1]
    before[1:] = np.where(starts > 0, total[starts - 1], 0) if len(total) else 0
    for rank in np.flatnonzero(before):
        total[schedule.rows(int(rank))] -= before[rank]
    return total


def peak(
    schedule: Schedule,
    saved: npt.ArrayLike = 1,
    waiting: npt.ArrayLike = 0,
    *,
    inputs: npt.ArrayLike = 0,
    freed_at: FreedAt = "W",
) -> Bytes:
    """The most each rank ever holds, int64, shape (ranks,); the arguments are those of `held`.

    As called without bytes: the peak of activations in chunks.
    """
    return _highest(held(schedule, saved, waiting, inputs=inputs, freed_at=freed_at), schedule)


@dataclass(frozen=True)
class Budget:
    """How much a rank may hold, and what is counted.

    Attributes:
        limit: bytes, one number or one a rank.
        saved, waiting, inputs, freed_at: as for `held`; without them the limit is in chunks.
    """

    limit: npt.ArrayLike
    saved: npt.ArrayLike = 1
    waiting: npt.ArrayLike = 0
    inputs: npt.ArrayLike = 0
    freed_at: FreedAt = "W"

    def limits(self, ranks: int) -> Bytes:
        """The limit of every rank, int64, shape (ranks,).

        Raises:
            ScheduleError: limits that are negative or not whole, or not one a rank.
        """
        return _whole("limit", self.limit, ranks, "rank")

    def held(self, schedule: Schedule) -> Bytes:
        """`held` with what is counted here."""
        return held(schedule, self.saved, self.waiting, inputs=self.inputs, freed_at=self.freed_at)

    def peak(self, schedule: Schedule) -> Bytes:
        """`peak` with what is counted here."""
        return _highest(self.held(schedule), schedule)

    def least(self, schedule: Schedule) -> Bytes:
        """The least that any order of a schedule's ops can make every rank hold, int64, shape (ranks,).

        The first backward of a microbatch on a rank comes after all its forwards there, so each rank holds all
        of one microbatch at some time; running one microbatch after the other takes no more.
        """
        s, top = schedule, schedule.stages - 1
        after = np.array([0, 1, 1, 2, 0])[s.kind]
        turn = np.where(s.kind == Kind.F, s.stage, schedule.stages + 3 * (top - s.stage) + after)
        rank = np.repeat(np.arange(s.ranks), np.diff(s.offsets))
        order = np.lexsort((turn, s.microbatch, rank))
        alone = replace(s, stage=s.stage[order], kind=s.kind[order], microbatch=s.microbatch[order])
        return _highest(self.held(alone), alone)


def _highest(column: Bytes, schedule: Schedule) -> Bytes:
    rows = map(schedule.rows, range(schedule.ranks))
    return np.array([max(0, column[part].max(initial=0)) for part in rows], np.int64)


def _whole(name: str, given: npt.ArrayLike, count: int, each: str) -> Bytes:
    table = np.asarray(given)
    if table.ndim > 1 or (table.ndim == 1 and len(table) != count):
        raise ScheduleError(
            f"{name} has shape {table.shape}; give one number of bytes, or one for each of the {count} {each}s"
        )
    if table.dtype.kind not in "iu" or (table < 0).any():
        raise ScheduleError(f"{name} must be whole bytes of at least 0, not {given!r}")
    return np.broadcast_to(table.astype(np.int64), (count,))
