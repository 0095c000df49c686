"""The end of a step: all ranks finish it or none, all get every loss, and their batches and gradient scales agree.

Each rank reports to the collector, the rank of the last stage, when its ops are done: the losses it has, and the first
number that is not finite. The collector answers with all losses and one verdict. A rank that failed has sent its failure
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from penstock.base.errors import BatchError, NonFiniteError, PenstockError, StageError
from penstock.parallel.dtensor import local, real_values
from penstock.parallel.participant import Losses, Outcome, Participant, Refusal, Step, StepFailure
from penstock.runtime.failure_report import failure_of
from penstock.runtime.health.rank_progress import RankProgress
from penstock.runtime.transport.channel import Channel
from penstock.schedule.program import Action, Program
from penstock.stage.compute.stage import Stage
from penstock.stage.values import Message

# In the order of causes, since of two refusals the smaller one counts.
_BATCHES, _SCALES, _ROWS, _IGNORED, _LOSS, _GRADIENT, _WEIGHT = range(7)

TRAINABLE, COUNTED, GRAPH, APART = 1, 2, 4, 8
"""Flags of a step: a parameter requires gradients, a loss has a weight above 0, a loss has a graph, two microbatches cannot
be joined."""


def uneven(losses: Losses) -> list[Refusal]:
    """Return a refusal for the first microbatch whose input and target differ in rows."""
    pairs = zip(losses.rows_in, losses.rows_out, strict=False)
    return [Refusal(_ROWS, 0, n) for n, (a, b) in enumerate(pairs) if a != b][:1]


def find_nonfinite(
    stages: Mapping[int, Stage],
    losses: Losses,
    last: int,
    first: int,
    ignored_index: Callable[[int], int | None],
    sharded_grads: Sequence[Callable[[int], list[Tensor]]] = (),
) -> Refusal | None:
    """Return the first number of a rank's step that is NaN or infinite, and clear the stages' `finite_sums`.

    Args:
        first: number in the global batch of this replica's microbatch 0.
        sharded_grads: functions that return gradients of a stage which are not in ``.grad``.
    """
    counting = {n: loss for n, loss in losses.total.items() if losses.weights.get(n, 1.0)}
    refusals = [Refusal(_LOSS, 0, n) for n in _nonfinite(counting.items())]
    for s, stage in stages.items():
        refusals += [Refusal(_GRADIENT, last - s, first + n) for n in _nonfinite(stage.finite_sums)]
        stage.finite_sums.clear()
        grads = [real_values(local(p.grad)) for p in stage.module.parameters() if p.grad is not None]
        grads += [grad for of_stage in sharded_grads for grad in of_stage(s)]
        if grads and not bool(torch.nn.utils.get_total_norm(grads).isfinite()):
            refusals.append(Refusal(_WEIGHT, last - s, -1))
    refusal = min(refusals, default=None)
    index = ignored_index(refusal.microbatch) if refusal is not None and refusal.kind == _LOSS else None
    return refusal if refusal is None or index is None else Refusal(_IGNORED, index, refusal.microbatch)


def _nonfinite(numbers: Iterable[tuple[int, Tensor]]) -> list[int]:
    """Return the microbatches whose number is not finite; all are checked at once, to wait for a device only once."""
    pairs = list(numbers)
    if not pairs:
        return []
    values = [number for _, number in pairs]
    if any(value.dtype is not torch.float32 for value in values):
        values = [_narrowed(value) for value in values]
    finite = torch.stack(values).isfinite().tolist()
    return [n for (n, _), is_finite in zip(pairs, finite, strict=True) if not is_finite]


def _narrowed(number: Tensor) -> Tensor:
    """Return a float32 that is finite exactly if the number is, which may be too large for float32."""
    # Of a finite number 0 * x is 0, and of any other NaN.
    return (number * 0 if number.dtype is torch.float64 else number).float()


def explain(refusal: Refusal, losses: Losses, last: int, step: int) -> PenstockError:
    """Return the error that every rank raises for a refusal."""
    if refusal.kind == _BATCHES:
        return BatchError(
            f"step {step}: the processes were given different batches; the first stage's rank takes its x, the last "
            "one's its y, and each replica its rows, which must belong together. Give the loader a generator of its own, "
            "seeded alike on every process; or give x and y only where they are needed and None elsewhere. No weight was "
            "changed; zero the gradients before the next step"
        )
    if refusal.kind == _SCALES:
        return PenstockError(
            f"step {step}: since the last step, the gradients were scaled by another factor on one rank than on another, "
            "and the weights have taken that update. torch.nn.utils.clip_grad_norm_ takes the norm over this process's "
            "stages alone; use pipe.clip_grad_norm_(max_norm), or PipelineOptimizer(pipe, ..., clip=max_norm), which take "
            "it over all ranks. Start again, or go back to a checkpoint"
        )
    if refusal.kind == _ROWS:
        return BatchError(
            f"step {step}: the target's microbatches have {list(losses.rows_out)} rows, the input's "
            f"{list(losses.rows_in)}; both are split along dimension 0, the batch. No weight was changed; zero the "
            "gradients before the next step"
        )
    if refusal.kind == _IGNORED:
        what = f"the loss of microbatch {refusal.microbatch}"
        return NonFiniteError(
            f"step {step}: {what} is NaN: all of its targets are {refusal.depth} (ignore_index), so its mean is 0/0. No "
            "weight was changed; zero the gradients before the next step. Give the Pipeline reduction='valid', or "
            "reduction=penstock.valid_tokens if the loss shifts the labels: such a microbatch then weighs nothing",
            last,
            refusal.microbatch,
            what,
        )
    stage = last - refusal.depth
    what = {
        _LOSS: f"the loss of microbatch {refusal.microbatch}",
        _GRADIENT: f"the input gradient of stage {stage} for microbatch {refusal.microbatch}",
        _WEIGHT: f"the gradient of a weight of stage {stage}",
    }[refusal.kind]
    return NonFiniteError(
        f"step {step}: {what} is NaN or infinite. No weight was changed; zero the gradients before the next step. A "
        "lower learning rate, a longer warm-up or clipping usually helps; with float16 use a GradScaler",
        stage,
        refusal.microbatch,
        what,
    )


class OtherRanks(Participant):
    """The other ranks of a pipeline: they agree with this one on a step's outcome, or are told that it failed.

    Args:
        progress: this rank's progress, for the notice of a failure.
    """

    def __init__(self, program: Program, rank: int, channel: Channel, progress: RankProgress) -> None:
        self._program, self._rank, self._channel, self._progress = program, rank, channel, progress
        self._ranks = program.schedule.ranks
        self._collector = program.schedule.placement.holders[-1][0]
        self._tag = program.tags  # after the tags of all messages
        self._step = 0

    def begin(self, step: Step) -> None:
        self._step = step.number
        self._channel.open(step.number, step.trains, step.microbatches)

    def agree(self, outcome: Outcome) -> None:
        """Fill in the losses of all ranks, the refusal nearest to its origin, and all flags."""
        channel, losses, collector, tag = self._channel, outcome.losses, self._collector, self._tag
        # Threads share the losses already, and reading a loss would wait for a GPU.
        sent = Losses() if channel.one_process else losses
        if self._rank != collector:
            channel.send(collector, tag, _pack(sent, outcome.refusal, outcome.flags))
            outcome.refusal, outcome.flags = _unpack(channel.recv(collector, tag), losses)
            return
        others = [r for r in range(self._ranks) if r != collector]
        refusals = [outcome.refusal]
        for r in others:
            refusal, flags = _unpack(channel.recv(r, tag), losses)
            refusals.append(refusal)
            outcome.flags |= flags
        outcome.refusal = min((r for r in [*uneven(losses), *refusals] if r is not None), default=None)
        for r in others:
            channel.send(r, tag, _pack(sent, outcome.refusal, outcome.flags))

    def end(self, step: Step, outcome: Outcome) -> None:
        self._channel.finish()

    def abandon(self, failure: StepFailure) -> None:
        error, report = failure.error, failure.report
        self._channel.fail(failure_of(error, report, self._rank, self._step, self._program, self._progress))
        # What they still send is taken, unless they are in another call, do not send, or a user interrupts.
        if isinstance(error, Exception) and not failure.told:
            lines = self._program.instructions(self._rank)
            self._channel.drain([line.peer for line in lines if line.action is Action.RECV])


# Each mark takes its bits twice. With the flags that makes 62, and an int64 carries 63 without its sign.
_FLAGS = 4  # number of flags; the marks are the bits above them
_MARKS = (19, 5, 5)  # bits of the marks: of the batch's digest, and of the scale of gradients on two grids
_GRID = 0.1  # of the logarithm of a scale


def marks_of(digest: int | None, scale: float | None = None) -> int:
    """Return marks that, or-ed with the marks of another rank, show whether its batch or its scale of gradients differs.

    A number and its complement are or-ed. If two numbers differ, a bit is then set in both. A scale has its place on two
    grids, shifted by half a step, so that rounding moves it to another place on one of them at most. Scales that are 10 %
    apart have other places on both.
    """
    place = None if scale is None else math.log(scale) / _GRID
    numbers = (digest, *((None, None) if place is None else (math.floor(place), math.floor(place + 0.5))))
    marks, shift = 0, _FLAGS
    for number, bits in zip(numbers, _MARKS, strict=True):
        if number is not None:
            mask = (1 << bits) - 1
            marks |= (number & mask | (~number & mask) << bits) << shift
        shift += 2 * bits
    return marks


def compare_marks(flags: int, refusal: Refusal | None) -> tuple[Refusal | None, int]:
    """Return the refusal that the marks of all ranks give, else `refusal`; and the flags without the marks."""
    differ, shift = [], _FLAGS
    for bits in _MARKS:
        differ.append(flags >> shift & flags >> shift + bits & (1 << bits) - 1)
        shift += 2 * bits
    batches, *scales = differ
    if batches:
        refusal = Refusal(_BATCHES, 0, 0)
    elif all(scales):
        refusal = Refusal(_SCALES, 0, 0)
    return refusal, flags & (1 << _FLAGS) - 1


def require_graph(flags: int, step: int) -> None:
    """Raise StageError if no loss has a graph, although losses count and there are parameters that require gradients."""
    if flags & (TRAINABLE | COUNTED | GRAPH) == TRAINABLE | COUNTED:
        raise StageError(
            f"step {step}: no microbatch's loss has a graph (its requires_grad is False), though there are parameters that "
            "require gradients, so nothing would train. Check loss_fn and the layers for .detach(), .item(), .data or "
            "torch.no_grad(); to compute the loss alone use Pipeline.evaluate"
        )


def _pack(losses: Losses, refusal: Refusal | None, flags: int) -> Message:
    """Pack a report; names are plain leaves, which travel only when they change, and all else is in tensors."""
    ids = sorted(losses.total)
    names = sorted({name for part in losses.parts.values() for name in part})
    leaves = (
        torch.tensor(ids, dtype=torch.int64),
        _column([losses.total[n] for n in ids]),
        torch.tensor([losses.weights.get(n, 1.0) for n in ids], dtype=torch.float64),
        torch.tensor((flags, *(refusal or ())), dtype=torch.int64),
        torch.tensor(losses.rows_in, dtype=torch.int64),
        torch.tensor(losses.rows_out, dtype=torch.int64),
        torch.tensor([losses.total[n].shape for n in ids if losses.total[n].dim()], dtype=torch.int64),
        *(_column([losses.parts[n].get(name, _ABSENT) for n in ids]) for name in names),
        *names,
    )
    return Message(leaves, None, (False,) * len(leaves))


_ABSENT = torch.tensor(0.0)


def _column(losses: Sequence[Tensor]) -> Tensor:
    return torch.cat([loss.cpu().flatten() for loss in losses]) if losses else torch.empty(0)


def _unpack(message: Message, losses: Losses) -> tuple[Refusal | None, int]:
    ids, total, weights, verdict, rows_in, rows_out, shapes, *rest = message.leaves
    losses.rows_in = losses.rows_in or tuple(rows_in.tolist())
    losses.rows_out = losses.rows_out or tuple(rows_out.tolist())
    # A column for each name, then the names.
    names = rest[len(rest) // 2 :]
    numbers = ids.tolist()
    if len(shapes):  # of values of each position
        parts = zip(total.split(shapes.prod(1).tolist()), shapes.tolist(), strict=True)
        losses.total.update(zip(numbers, (part.view(shape) for part, shape in parts), strict=True))
    else:
        losses.total.update(zip(numbers, total, strict=True))
    losses.weights.update(zip(numbers, weights.tolist(), strict=True))
    for index, n in enumerate(numbers):
        losses.parts[n] = {name: column[index] for name, column in zip(names, rest, strict=False)}
    flags, *refusal = verdict.tolist()
    return Refusal(*refusal) if refusal else None, flags
