"""When a rank holds the weights and gradients of its stages in full, if they are sharded over replicas, or in a store.

Each of d replicas of a rank keeps 1/d of every weight and every summed gradient (ZeRO stages 2 and 3, 1910.02054, sections
5.2 and 5.3). Three operations make the rest come and go, by the names that ``torch.distributed.pipelining`` gives them:

    UNSHARD      gather a stage's weights from all replicas
    RESHARD      drop all of them but the replica's own part
    REDUCE_GRAD  sum a stage's gradients over the replicas, and drop all of the sums but the replica's own part

With a store, a rank keeps no part: UNSHARD copies the weights from host memory or a disk, and REDUCE_GRAD moves the
gradients there.

They follow from the ops of a schedule and from three choices. `window` is the number of stages that a rank may hold at once.
A stage stays from one op that reads its weights to the next one that does, unless others need its place; then the one goes
that is needed last, which is the choice with the fewest gathers (Belady, 1966). Forwards, backwards and recomputations read
weights. The weight half of a backward (W) does not: the gradient of a matrix is a product of the layer's input and of its
output's gradient. So a stage's weights go after its last I, before its W's.

`reduce_every` is the number of microbatches whose gradients are added up before they are summed over the replicas. A stage
holds its gradients in full from its first backward after a reduction to the next one.

A rank that has one stage needs its weights from its first forward to its last backward, so a window saves nothing there:
what sharding saves is what a rank with several stages does not need at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from penstock.base.counts import is_count, plural
from penstock.base.errors import ScheduleError
from penstock.schedule.ops import Kind
from penstock.schedule.schedule import Schedule

Shard = Literal["none", "optimizer", "gradients", "weights"]
"""Kinds of sharding over replicas; each also divides what the one before it does."""

Store = Literal["none", "host", "disk"]
"""Where a rank keeps weights that no op reads: on its device, in host memory, or in files."""

_READS_WEIGHTS = (Kind.F, Kind.B, Kind.I, Kind.R)
_ENDS = (Kind.B, Kind.W)


@dataclass(frozen=True)
class Sharding:
    """Choice of what replicas divide or a store keeps, and how long a rank holds it in full.

    Args:
        shard: "none" (default), "optimizer" (ZeRO-1), "gradients" (ZeRO-2) or "weights" (ZeRO-3).
        window: stages whose weights a rank may hold at once, with shard="weights" or a store; None (default) for all of the
            rank.
        reduce_every: microbatches whose gradients are added up before they are summed over the replicas, with
            shard="gradients" or "weights", or go to a store; None (default) for all of the step.
        store: where weights are while no op reads them, and gradients once they are added up: "none" (default), "host" or
            "disk".

    Raises:
        ScheduleError: if a value is not allowed, or is given where it has no meaning.
    """

    shard: Shard = "none"
    window: int | None = None
    reduce_every: int | None = None
    store: Store = "none"

    def __post_init__(self) -> None:
        for choice, chosen, kinds in (
            ("shard", self.shard, get_args(Shard)),
            ("store", self.store, get_args(Store)),
        ):
            if chosen not in kinds:
                raise ScheduleError(f"{choice} must be one of {', '.join(kinds)}, got {chosen!r}")
        if self.stored and self.shard != "none":
            raise ScheduleError(
                f"store={self.store!r} keeps weights and gradients whole, and shard={self.shard!r} divides them over "
                "replicas; leave one of them out"
            )
        for name, value, needs in (
            ("window", self.window, ("weights",)),
            ("reduce_every", self.reduce_every, ("gradients", "weights")),
        ):
            if value is None:
                continue
            if not is_count(value):
                raise ScheduleError(f"{name} must be a number of at least 1, or None, got {value!r}")
            if self.shard not in needs and not self.stored:
                raise ScheduleError(
                    f"{name} = {value} needs shard = {' or '.join(map(repr, needs))} or a store, and shard is "
                    f"{self.shard!r} and store {self.store!r}; leave {name} out"
                )

    @property
    def stored(self) -> bool:
        """True if weights and gradients are kept in a store."""
        return self.store != "none"

    @property
    def weights_come_and_go(self) -> bool:
        """True if weights are held in full for a part of a step only."""
        return self.shard == "weights" or self.stored

    @property
    def comes_and_goes(self) -> bool:
        """True if weights or gradients are held in full for a part of a step only."""
        return self.shard in ("gradients", "weights") or self.stored


class Run(NamedTuple):
    """A stay of a stage's weights on a rank.

    Attributes:
        gathered: row before which the gather is begun: the earliest where the window has a place for it.
        first, last: rows of the first and the last op that read the weights.
    """

    stage: int
    gathered: int
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Residency:
    """The operations that `Sharding` adds to a schedule.

    Attributes:
        sharding: the choices they follow from.
        runs: stays of weights, by rank, in the order in which they begin; none unless weights are sharded.
        reductions: (row, stage) pairs, by rank: REDUCE_GRAD of the stage comes after the row.
    """

    sharding: Sharding
    runs: tuple[tuple[Run, ...], ...]
    reductions: tuple[tuple[tuple[int, int], ...], ...]

    def summary(self) -> str:
        """Return how often ranks gather and reduce in a step, as a sentence."""
        reductions = [len(each) for each in self.reductions]
        how = f"in a store ({self.sharding.store})" if self.sharding.stored else "sharded"
        text = f"gradients {how}: at most {plural(max(reductions), 'reduction')} a rank and step"
        if not self.sharding.weights_come_and_go:
            return text
        return f"weights and {text}, and {plural(max(map(len, self.runs)), 'gather')} of a stage"

    def unshards(self, rank: int) -> dict[int, list[int]]:
        """Row of a rank → stages whose gathers begin before it."""
        return _by_row((run.gathered, run.stage) for run in self.runs[rank])

    def reshards(self, rank: int) -> dict[int, list[int]]:
        """Row of a rank → stages whose weights go after it."""
        return _by_row((run.last, run.stage) for run in self.runs[rank])

    def reduces(self, rank: int) -> dict[int, list[int]]:
        """Row of a rank → stages whose gradients are reduced after it."""
        return _by_row(self.reductions[rank])

    def held(
        self, schedule: Schedule, weights: npt.ArrayLike, gradients: npt.ArrayLike, replicas: int
    ) -> npt.NDArray[np.int64]:
        """Return the bytes of weights and gradients that the rank of every row holds as it runs, int64, shape (ops,).

        A rank holds its part of all its weights, and all weights of stages that are gathered. It holds its part of the
        gradients that were reduced in the step, and all gradients of stages that have begun a backward since they were
        reduced last. A reduction runs beside the rank's next op, and its gradients go after that op. With a store, a rank
        holds no parts.

        Args:
            weights, gradients: bytes of each stage, one number or one per stage.
            replicas: number of replicas that each hold a part.
        """
        weight = np.broadcast_to(np.asarray(weights, np.int64), (schedule.stages,))
        gradient = np.broadcast_to(np.asarray(gradients, np.int64), (schedule.stages,))
        change = np.zeros(len(schedule) + 1, np.int64)
        total = np.zeros(len(schedule), np.int64)
        for rank, stages in enumerate(schedule.placement.stages_of):
            rows = schedule.rows(rank)
            always = int(weight[list(stages)].sum())
            if self.sharding.weights_come_and_go:
                parts = -(-weight[list(stages)] // replicas)
                always = 0 if self.sharding.stored else int(parts.sum())
                for run in self.runs[rank]:
                    change[run.gathered] += weight[run.stage]
                    change[run.last + 1] -= weight[run.stage]
            for stage, first, last, begins in self._open(schedule, rank):
                change[first] += gradient[stage]
                change[last + 1] -= gradient[stage]
                if begins and not self.sharding.stored:
                    change[last + 1] += -(-gradient[stage] // replicas)
            total[rows] = always + np.cumsum(change[rows])
            change[rows.stop] = 0  # the next rank begins with nothing
        return total

    def _open(self, schedule: Schedule, rank: int) -> Iterator[tuple[int, int, int, bool]]:
        """Yield (stage, first row, last row, whether it is the stage's first) of gradients that are held in full."""
        rows = schedule.rows(rank)
        backward = np.isin(schedule.kind[rows], (Kind.B, Kind.I, Kind.W))
        of_stage = {
            stage: rows.start + np.flatnonzero(backward & (schedule.stage[rows] == stage))
            for stage in schedule.placement.stages_of[rank]
        }
        before: dict[int, int] = {}  # row of the stage's last reduction
        for row, stage in self.reductions[rank]:
            mine = of_stage[stage]
            opened = int(mine[np.searchsorted(mine, before.get(stage, -1), "right")])
            yield stage, opened, beside(schedule, row, rows.stop), stage not in before
            before[stage] = row

    def text(self, schedule: Schedule, rank: int) -> Iterator[str]:
        """Yield one rank's ops with these operations among them, as PyTorch writes them."""
        unshards, reshards, reduces = self.unshards(rank), self.reshards(rank), self.reduces(rank)
        row = schedule.rows(rank).start
        for op in schedule.ops(rank):
            rows = range(row, row + (2 if schedule.paired[row] else 1))
            yield from (f"{stage}UNSHARD" for r in rows for stage in unshards.get(r, ()))
            yield str(op)
            yield from (f"{stage}RESHARD" for r in rows for stage in reshards.get(r, ()))
            yield from (f"{stage}REDUCE_GRAD" for r in rows for stage in reduces.get(r, ()))
            row = rows.stop


def make_residency(schedule: Schedule, sharding: Sharding) -> Residency:
    """Return the operations that a choice of `Sharding` adds to a valid schedule.

    Raises:
        ScheduleError: if replicas divide weights or gradients of stages that several ranks hold, whose gradients are added
            up before replicas' are, or if the window is too small for a fused pair of two stages, or larger than the stages
            of every rank.
    """
    if schedule.placement.has_copies and not sharding.stored:
        raise ScheduleError(
            f"{schedule.name} has copies of stages, whose gradients are complete together only; use shard='optimizer' or "
            "'none', or a schedule that has each stage once"
        )
    window, most = sharding.window, max(map(len, schedule.placement.stages_of))
    if window is not None and window > most:
        raise ScheduleError(
            f"window must be at most the {plural(most, 'stage')} that {schedule.name} gives a rank, got {window}; use "
            f"{'1' if most == 1 else f'1 to {most}'}, None for all of the rank, or more stages (virtual_stages)"
        )
    ranks = range(schedule.ranks)
    trains = bool((schedule.kind != Kind.F).any())
    return Residency(
        sharding,
        tuple(tuple(_runs(schedule, rank, window)) if sharding.weights_come_and_go else () for rank in ranks),
        tuple(
            tuple(_reductions(schedule, rank, sharding.reduce_every or schedule.microbatches))
            if trains
            else ()
            for rank in ranks
        ),
    )


def beside(schedule: Schedule, row: int, stop: int) -> int:
    """Return the last row of the op after a row, beside which a reduction runs; `stop` ends the rank's rows."""
    after = min(row + 1, stop - 1)
    return after + int(schedule.paired[after])


def _by_row(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for row, stage in pairs:
        rows.setdefault(row, []).append(stage)
    return rows


def _groups(schedule: Schedule, rank: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield (first row, last row, stages that are read) of the rank's ops that read weights; a pair is one of them."""
    rows = schedule.rows(rank)
    reads = np.isin(schedule.kind[rows], _READS_WEIGHTS).tolist()
    stages, paired = schedule.stage[rows].tolist(), schedule.paired[rows].tolist()
    first = 0
    while first < len(reads):
        last = first + 1 if paired[first] else first
        if read := tuple(dict.fromkeys(stages[r] for r in range(first, last + 1) if reads[r])):
            yield rows.start + first, rows.start + last, read
        first = last + 1


def _runs(schedule: Schedule, rank: int, window: int | None) -> Iterator[Run]:
    groups = list(_groups(schedule, rank))
    limit = window or len(schedule.placement.stages_of[rank])
    if (most := max((len(stages) for *_, stages in groups), default=0)) > limit:
        raise ScheduleError(
            f"{schedule.name}: an op of rank {rank} reads the weights of {most} stages, and the window is {limit}; use at "
            f"least {most}"
        )
    coming: dict[int, int] = {}  # stage → place of its next op
    following: list[list[int]] = []  # of every group, the last first: places of the next ops of its stages
    for place in reversed(range(len(groups))):
        stages = groups[place][2]
        # A stage that is needed no more comes after all others.
        following.append([coming.get(stage, len(groups)) for stage in stages])
        coming.update(dict.fromkeys(stages, place))
    # Stage → first and last op so far of a stay that may go on, and its next op.
    stays: dict[int, list[int]] = {}
    ended: list[tuple[int, int, int]] = []
    for place, (*_, stages) in enumerate(groups):
        for stage, later in zip(stages, following.pop(), strict=True):
            if stage in stays:
                stays[stage][1:] = place, later
                continue
            if len(stays) == limit:
                # The stage that is needed last.
                goes = max((other for other in stays if other not in stages), key=lambda s: stays[s][2])
                first, last, _ = stays.pop(goes)
                ended.append((first, last, goes))
            stays[stage] = [place, place, later]
    ended += [(first, last, stage) for stage, (first, last, _) in stays.items()]
    change = [0] * (len(groups) + 1)
    for first, last, _ in ended:
        change[first] += 1
        change[last + 1] -= 1
    held = list(accumulate(change))
    for first, last, stage in sorted(ended):
        ahead = first
        # As early as the window has a place for it, so that the gather runs beside the ops before.
        while ahead > 0 and held[ahead - 1] < limit:
            ahead -= 1
            held[ahead] += 1
        yield Run(stage, groups[ahead][0], groups[first][0], groups[last][1])


def _reductions(schedule: Schedule, rank: int, every: int) -> Iterator[tuple[int, int]]:
    rows = schedule.rows(rank)
    ends = np.isin(schedule.kind[rows], _ENDS)
    found = []
    for stage in schedule.placement.stages_of[rank]:
        done = rows.start + np.flatnonzero(ends & (schedule.stage[rows] == stage))
        found += [(int(row), stage) for row in dict.fromkeys((*done[every - 1 :: every], *done[-1:]))]
    yield from sorted(found)
