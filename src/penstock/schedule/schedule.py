"""The data of a schedule: every rank's ops in order.

Ops are kept as numpy columns, rank after rank, because one schedule may have tens of millions of them. `Schedule.ops`
returns them as objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.counts import describe_size, plural
from penstock.base.errors import ScheduleError
from penstock.schedule.ops import Kind, Op, Pair
from penstock.schedule.placement import Placement

IntColumn = npt.NDArray[np.int32]
KindColumn = npt.NDArray[np.int8]
BoolColumn = npt.NDArray[np.bool_]


class Columns(NamedTuple):
    """One rank's ops in order; ``paired[i]`` says that op i and op i+1 run as one fused pair."""

    stage: IntColumn
    kind: KindColumn
    microbatch: IntColumn
    paired: BoolColumn


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Schedule:
    """An ordered list of ops per rank.

    Attributes:
        name: family name, or path of the file it was read from.
        placement: ranks that hold each stage.
        microbatches: number of microbatches in a step.
        offsets: int64, shape (ranks + 1,); rank r's ops are rows offsets[r]..offsets[r+1]-1.
        stage, kind, microbatch, paired: the ops of all ranks, shape (ops,).
        options: the parameters the family built it with, for display.
        notes: what was dropped and assumed when a file was read, as sentences.
    """

    name: str
    placement: Placement
    microbatches: int
    offsets: npt.NDArray[np.int64]
    stage: IntColumn
    kind: KindColumn
    microbatch: IntColumn
    paired: BoolColumn
    options: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.placement.stages

    @property
    def in_order(self) -> bool:
        """True if every stage's gradients are summed in the order of the microbatches, on one rank.

        A run is then bit-equal to plain accumulation.
        """
        if self.placement.has_copies:
            return False
        for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W)):
            rows = np.flatnonzero(np.isin(self.kind, kinds))
            rows = rows[np.argsort(self.stage[rows], kind="stable")]
            # The sort is stable, so the rows of a stage are in the order in which they run.
            falls = np.diff(self.microbatch[rows]) <= 0
            if (falls & (np.diff(self.stage[rows]) == 0)).any():
                return False
        return True

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, {describe_size(self.ranks, self.stages, self.microbatches)}, "
            f"{plural(len(self), 'op')})"
        )

    def __len__(self) -> int:
        """Return the number of ops; a fused pair counts as two."""
        return len(self.stage)

    def __eq__(self, other: object) -> bool:
        """Compare placement, ops and their order; names, options and notes do not count."""
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            self.placement == other.placement
            and self.microbatches == other.microbatches
            and all(
                np.array_equal(getattr(self, c), getattr(other, c))
                for c in ("offsets", "stage", "kind", "microbatch", "paired")
            )
        )

    def __hash__(self) -> int:
        """Return a hash of the counts, which equal schedules share."""
        return hash((self.placement, self.microbatches, len(self)))

    def rows(self, rank: int) -> slice:
        """Return the range of rows that hold one rank's ops."""
        return slice(int(self.offsets[rank]), int(self.offsets[rank + 1]))

    def columns(self, rank: int) -> Columns:
        """Return one rank's ops as columns (views, not copies)."""
        rows = self.rows(rank)
        return Columns(self.stage[rows], self.kind[rows], self.microbatch[rows], self.paired[rows])

    def op(self, row: int | np.integer[Any]) -> Op:
        """Return the op in one row, without its pair."""
        return Op(int(self.stage[row]), Kind(int(self.kind[row])), int(self.microbatch[row]))

    def rank_of(self, row: int) -> int:
        """Return the rank a row belongs to."""
        return int(np.searchsorted(self.offsets, row, side="right")) - 1

    def ops(self, rank: int) -> Iterator[Op | Pair]:
        """Yield one rank's ops as objects, pairs joined."""
        rows = self.rows(rank)
        row = rows.start
        while row < rows.stop:
            if self.paired[row]:
                yield Pair(self.op(row), self.op(row + 1))
                row += 2
            else:
                yield self.op(row)
                row += 1

    def text(self, rank: int) -> str:
        """Return one rank's ops in PyTorch's notation, separated by blanks."""
        return " ".join(str(op) for op in self.ops(rank))

    def forwards(self, microbatches: int | None = None) -> Schedule:
        """Return the schedule with its forwards alone, for evaluation.

        Args:
            microbatches: how many of the microbatches, the first ones (default all).
        """
        count = self.microbatches if microbatches is None else microbatches
        kept = []
        for rank in range(self.ranks):
            stage, kind, microbatch, _ = self.columns(rank)
            forward = (kind == Kind.F) & (microbatch < count)
            kept.append(plain_columns(stage[forward], Kind.F, microbatch[forward]))
        return Schedule.from_columns(self.name, self.placement, count, kept, self.options)

    @staticmethod
    def from_columns(
        name: str,
        placement: Placement,
        microbatches: int,
        columns: Iterable[Columns],
        options: Mapping[str, object] | None = None,
    ) -> Schedule:
        """Join `columns`, one `Columns` a rank, into a schedule."""
        per_rank = list(columns)
        if len(per_rank) != placement.ranks:
            raise ScheduleError(
                f"{name}: {len(per_rank)} lists of ops for {placement.ranks} ranks; give one per rank"
            )
        if microbatches < 1:
            raise ScheduleError(f"{name}: microbatches must be at least 1, got {microbatches}")
        offsets = np.zeros(placement.ranks + 1, np.int64)
        np.cumsum([len(c.stage) for c in per_rank], out=offsets[1:])
        return Schedule(
            name=name,
            placement=placement,
            microbatches=microbatches,
            offsets=offsets,
            stage=np.concatenate([c.stage for c in per_rank]).astype(np.int32, copy=False),
            kind=np.concatenate([c.kind for c in per_rank]).astype(np.int8, copy=False),
            microbatch=np.concatenate([c.microbatch for c in per_rank]).astype(np.int32, copy=False),
            paired=np.concatenate([c.paired for c in per_rank]).astype(np.bool_, copy=False),
            options=dict(options or {}),
        )

    @staticmethod
    def from_ops(
        name: str,
        placement: Placement,
        microbatches: int,
        ops: Sequence[Iterable[Op | Pair]],
        options: Mapping[str, object] | None = None,
    ) -> Schedule:
        """Build a schedule from one list of ops per rank."""
        return Schedule.from_columns(
            name, placement, microbatches, [_columns(rank_ops) for rank_ops in ops], options
        )


def _columns(ops: Iterable[Op | Pair]) -> Columns:
    rows: list[tuple[int, int, int, bool]] = []
    for op in ops:
        if isinstance(op, Pair):
            rows.append((op.forward.stage, op.forward.kind, op.forward.microbatch, True))
            rows.append((op.backward.stage, op.backward.kind, op.backward.microbatch, False))
        else:
            rows.append((op.stage, op.kind, op.microbatch, False))
    table = np.array(rows, np.int64).reshape(-1, 4)
    return Columns(
        table[:, 0].astype(np.int32),
        table[:, 1].astype(np.int8),
        table[:, 2].astype(np.int32),
        table[:, 3].astype(np.bool_),
    )


def plain_columns(stage: npt.ArrayLike, kind: npt.ArrayLike, microbatch: npt.ArrayLike) -> Columns:
    """Return columns without pairs; scalars are repeated to the common length."""
    s, k, m = np.broadcast_arrays(stage, kind, microbatch)
    return Columns(s.astype(np.int32), k.astype(np.int8), m.astype(np.int32), np.zeros(s.shape, np.bool_))
