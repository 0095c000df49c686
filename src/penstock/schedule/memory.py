"""Bytes of activations that each rank holds after every op, computed from the schedule alone.

A forward saves its activations. The full backward ``B`` drops them. If the backward is split, the weight half ``W`` drops
them (as in the executor), or already the input half ``I`` (as counted in the zero-bubble paper, 2401.10241). The gradient
that the weight half needs may wait from ``I`` to ``W`` besides.

With one byte a stage, the same sums count activations in chunks. A chunk is one microbatch on one stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ScheduleError
from penstock.schedule.index import rank_column
from penstock.schedule.ops import Kind
from penstock.schedule.residency import Residency
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
    """Return the bytes that the rank of every row holds right after that row, int64, shape (ops,).

    Sizes are as in `Budget`; activations that no op frees stay. In a fused pair the forward is counted first, so that
    its row has the pair's peak.
    """
    save, wait, keep = (
        _whole(name, size, schedule.stages, "stage")
        for name, size in (("saved", saved), ("waiting", waiting), ("inputs", inputs))
    )
    change = np.zeros((len(Kind), schedule.stages), np.int64)
    change[Kind.F] = save
    change[Kind.B] = -save
    change[Kind.I] = wait - (save if freed_at == "B" else 0)
    change[Kind.W] = -wait - (save if freed_at == "W" else 0)
    # A forward that is recomputed keeps its input only (`light` below); the recompute adds the rest.
    change[Kind.R] = save - keep
    delta = change[schedule.kind, schedule.stage]
    if len(recomputes := np.flatnonzero(schedule.kind == Kind.R)):
        recomputed = np.zeros((schedule.stages, schedule.microbatches), np.bool_)
        recomputed[schedule.stage[recomputes], schedule.microbatch[recomputes]] = True
        light = (schedule.kind == Kind.F) & recomputed[schedule.stage, schedule.microbatch]
        delta[light] = keep[schedule.stage[light]]
    # One sum over the rows of all ranks; what it has at the end of the rank before is subtracted below.
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
    """Return the peak of each rank, int64, shape (ranks,); see `held` for the arguments.

    Without bytes, the peak counts activations in chunks.
    """
    return _peak(held(schedule, saved, waiting, inputs=inputs, freed_at=freed_at), schedule)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of weights and of their gradients, held throughout, or as `penstock.schedule.residency` says if sharded.

    Attributes:
        weights, gradients: bytes of each stage, one number or one per stage.
        replicas: number of replicas that shard them (default 1).
    """

    weights: npt.ArrayLike
    gradients: npt.ArrayLike
    replicas: int = 1


@dataclass(frozen=True)
class Budget:
    """Limit on the memory of a rank.

    Attributes:
        limit: largest number of bytes that a rank may hold, one number or one per rank.
        saved: bytes that a forward saves for its backward, one number or one per stage (default 1: the limit is in chunks).
        waiting: bytes that wait from ``I`` to ``W``, one number or one per stage (default 0).
        inputs: bytes of the stage's input, one number or one per stage (default 0). A forward keeps only these if a
            recompute (``R``) of the same microbatch rebuilds the rest.
        freed_at: half of a split backward that drops the saved activations: "B", its input half, or "W" (default).
        weights: bytes of weights and of their gradients, which are counted as well (default None: only activations are).
    """

    limit: npt.ArrayLike
    saved: npt.ArrayLike = 1
    waiting: npt.ArrayLike = 0
    inputs: npt.ArrayLike = 0
    freed_at: FreedAt = "W"
    weights: WeightBytes | None = None

    def limits(self, ranks: int) -> Bytes:
        """Return the limit of every rank, int64, shape (ranks,).

        Raises:
            ScheduleError: if limits are negative or not whole, or not one per rank.
        """
        return _whole("limit", self.limit, ranks, "rank")

    def held(self, schedule: Schedule, residency: Residency | None = None) -> Bytes:
        """Return `held` with the sizes of this budget, and the bytes of weights and gradients."""
        activations = held(schedule, self.saved, self.waiting, inputs=self.inputs, freed_at=self.freed_at)
        if self.weights is None:
            return activations
        weights = _whole("weights", self.weights.weights, schedule.stages, "stage")
        gradients = _whole("gradients", self.weights.gradients, schedule.stages, "stage")
        if residency is not None:
            return activations + residency.held(schedule, weights, gradients, self.weights.replicas)
        fixed = [int((weights + gradients)[list(stages)].sum()) for stages in schedule.placement.stages_of]
        return activations + np.array(fixed, np.int64)[rank_column(schedule)]

    def peak(self, schedule: Schedule, residency: Residency | None = None) -> Bytes:
        """Return the peak of each rank of `held`, int64, shape (ranks,)."""
        return _peak(self.held(schedule, residency), schedule)

    def least(self, schedule: Schedule) -> Bytes:
        """Return the lowest peak of activations that any order of the ops can have on each rank, int64, shape (ranks,).

        The first backward of a microbatch on a rank comes after all its forwards there, so each rank holds all
        of one microbatch at some time. Running one microbatch after the other needs no more.
        """
        s, top = schedule, schedule.stages - 1
        # By kind, F B I W R: a stage's recompute comes first, then its B or I, then its W.
        after = np.array([0, 1, 1, 2, 0])[s.kind]
        turn = np.where(s.kind == Kind.F, s.stage, schedule.stages + 3 * (top - s.stage) + after)
        order = np.lexsort((turn, s.microbatch, rank_column(s)))
        alone = replace(s, stage=s.stage[order], kind=s.kind[order], microbatch=s.microbatch[order])
        only = replace(self, weights=None)
        return _peak(only.held(alone), alone)


def _peak(column: Bytes, schedule: Schedule) -> Bytes:
    rows = map(schedule.rows, range(schedule.ranks))
    return np.array([max(0, column[r].max(initial=0)) for r in rows], np.int64)


def _whole(name: str, sizes: npt.ArrayLike, count: int, each: str) -> Bytes:
    table = np.asarray(sizes)
    if table.ndim > 1 or (table.ndim == 1 and len(table) != count):
        raise ScheduleError(
            f"{name} has shape {table.shape}; give one number of bytes, or one for each of the {count} {each}s"
        )
    if table.dtype.kind not in "iu" or (table < 0).any():
        raise ScheduleError(f"{name} must be whole bytes of at least 0, got {sizes!r}")
    return np.broadcast_to(table.astype(np.int64), (count,))
