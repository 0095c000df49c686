"""The end of a step: all ranks finish it or none, all get every loss, and their batches and gradient scales agree.

Each rank reports to the collector, the rank of the last stage, when its ops are done: the losses it has, and the first
number that is not finite. The collector answers with all losses and one verdict. A rank that failed has sent its failure
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.encoding import sendable
from penstock.base.errors import BatchError, CallOrderError, NonFiniteError, PenstockError, StageError
from penstock.parallel.dtensor import local, real_values
from penstock.runtime.transport.channel import Channel
from penstock.stage.compute.stage import Stage
from penstock.stage.values import Message

# In the order of causes, since of two refusals the smaller one counts.
_BATCHES, _SCALES, _ROWS, _IGNORED, _LOSS, _GRADIENT, _WEIGHT = range(7)

TRAINABLE, COUNTED, GRAPH = 1, 2, 4
"""Flags of a step: a parameter requires gradients, a loss has a weight above 0, a loss has a graph."""


@sendable
class Refusal(NamedTuple):
    """Reason why all ranks refuse a step; of two, the smaller tuple is closer to the cause.

    Attributes:
        depth: number of stages between this one and the last; of ignored targets, the index that is ignored.
        microbatch: number of the microbatch; -1 for a weight.
    """

    kind: int
    depth: int
    microbatch: int


@sendable
@dataclass
class Losses:
    """The losses of a step.

    Attributes:
        total: loss by microbatch id, a 0-d tensor; or logarithms of probabilities, of shape (rows, tokens).
        weights: weight of each loss by microbatch id; the weights sum to 1, unless losses are summed.
    """

    total: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    rows_in: tuple[int, ...] = ()
    rows_out: tuple[int, ...] = ()

    def update(self, other: Losses) -> None:
        """Add the losses of another rank."""
        self.total.update(other.total)
        self.parts.update(other.parts)
        self.weights.update(other.weights)
        self.rows_in = self.rows_in or other.rows_in
        self.rows_out = self.rows_out or other.rows_out

    @property
    def uneven(self) -> list[Refusal]:
        """The first microbatch whose input and target differ in rows."""
        pairs = zip(self.rows_in, self.rows_out, strict=False)
        return [Refusal(_ROWS, 0, n) for n, (a, b) in enumerate(pairs) if a != b][:1]


def find_nonfinite(
    stages: Mapping[int, Stage],
    losses: Losses,
    last: int,
    first: int,
    ignored_index: Callable[[int], int | None],
    sharded_grads: Callable[[int], list[Tensor]] | None = None,
) -> Refusal | None:
    """Return the first number of a rank's step that is NaN or infinite, and clear the stages' `finite_sums`.

    Args:
        first: number in the global batch of this replica's microbatch 0.
    """
    counting = {n: loss for n, loss in losses.total.items() if losses.weights.get(n, 1.0)}
    refusals = [Refusal(_LOSS, 0, n) for n in _nonfinite(counting.items())]
    for s, stage in stages.items():
        refusals += [Refusal(_GRADIENT, last - s, first + n) for n in _nonfinite(stage.finite_sums)]
        stage.finite_sums.clear()
        grads = [real_values(local(p.grad)) for p in stage.module.parameters() if p.grad is not None]
        grads += sharded_grads(s) if sharded_grads is not None else []
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


def agree(
    channel: Channel | None,
    *,
    rank: int,
    collector: int,
    ranks: int,
    tag: int,
    losses: Losses,
    refusal: Refusal | None,
    flags: int,
) -> tuple[Refusal | None, int]:
    """End the step: fill in the losses of all ranks, and return the refusal nearest to its origin and all flags."""
    if channel is None:
        return refusal, flags
    # Threads share the losses already, and reading a loss would wait for a GPU.
    sent = Losses() if channel.one_process else losses
    if rank != collector:
        channel.send(collector, tag, _pack(sent, refusal, flags))
        return _unpack(channel.recv(collector, tag), losses)
    others = [r for r in range(ranks) if r != collector]
    refusals = [refusal]
    for r in others:
        other_refusal, other_flags = _unpack(channel.recv(r, tag), losses)
        refusals.append(other_refusal)
        flags |= other_flags
    verdict = min((r for r in [*losses.uneven, *refusals] if r is not None), default=None)
    for r in others:
        channel.send(r, tag, _pack(sent, verdict, flags))
    return verdict, flags


# Each mark takes its bits twice. With the flags that makes 63, which an int64 carries without its sign.
_FLAGS = 3  # number of flags; the marks are the bits above them
_MARKS = (20, 5, 5)  # bits of the marks: of the batch's digest, and of the scale of gradients on two grids
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


def require_same_number(numbers: Iterable[object]) -> None:
    """Raise CallOrderError unless all processes give the same number of microbatches to a step."""
    if len(found := sorted(set(map(str, numbers)))) > 1:
        raise CallOrderError(
            f"the processes give other numbers of microbatches to one step: {', '.join(found)}; every process must give the "
            "same. No weight was changed; zero the gradients before the next step"
        )


def require_graph(flags: int, step: int) -> None:
    """Raise StageError if no loss has a graph, although losses count and there are parameters that require gradients."""
    if flags == TRAINABLE | COUNTED:
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
        torch.tensor([len(losses.total[n]) for n in ids if losses.total[n].dim()], dtype=torch.int64),
        *(_column([losses.parts[n].get(name, _ABSENT) for n in ids]) for name in names),
        *names,
    )
    return Message(leaves, None, (False,) * len(leaves))


_ABSENT = torch.tensor(0.0)


def _column(losses: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.atleast_1d(loss.cpu()) for loss in losses]) if losses else torch.empty(0)


def _unpack(message: Message, losses: Losses) -> tuple[Refusal | None, int]:
    ids, total, weights, verdict, rows_in, rows_out, lengths, *rest = message.leaves
    losses.rows_in = losses.rows_in or tuple(rows_in.tolist())
    losses.rows_out = losses.rows_out or tuple(rows_out.tolist())
    # A column for each name, then the names.
    names = rest[len(rest) // 2 :]
    numbers = ids.tolist()
    losses.total.update(zip(numbers, total.split(lengths.tolist()) if len(lengths) else total, strict=True))
    losses.weights.update(zip(numbers, weights.tolist(), strict=True))
    for index, n in enumerate(numbers):
        losses.parts[n] = {name: column[index] for name, column in zip(names, rest, strict=False)}
    flags, *refusal = verdict.tolist()
    return Refusal(*refusal) if refusal else None, flags


_WATCHED, _NUMBERS = 2, 16
"""Gradients that are watched, and numbers of each."""

_LARGEST = 2**20
"""Numbers of the largest gradient that may be kept alive until the next step."""

_DISTINCT = 4
"""Magnitudes that a common factor is read from: of fewer, gradients clipped by value may look scaled."""

_SPREAD = 1.02
"""Largest ratio between factors that count as one, since gradients may be bfloat16."""

_FIRST, _EVERY = 20, 100
"""Steps in which gradients on a device are watched, since reading them waits for it: the first, then every n-th."""


class GradientScale:
    """The factor by which a program scaled this rank's gradients since the last step, which all ranks must have in common.

    ``torch.nn.utils.clip_grad_norm_`` takes the norm of the parameters that it is given. In processes these are the ones of
    the process's own stages, so every rank would scale its gradients by another factor. `Pipeline.clip_grad_norm_` takes
    the norm over all ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        real = (p for p in parameters if p.is_floating_point())
        unique = {id(p): p for p in real if _DISTINCT <= p.numel() <= _LARGEST}
        self._parameters = sorted(unique.values(), key=lambda p: p.numel())
        self._seen: list[tuple[Tensor, int, list[float]]] = []

    def remember(self, number: int) -> None:
        """Note some gradients at the end of a training step, by the number of steps before it."""
        with_grad = (
            p.grad for p in self._parameters if p.grad is not None and p.grad.layout is torch.strided
        )
        grads = list(islice(with_grad, _WATCHED))
        waits = any(grad.device.type != "cpu" for grad in grads)
        if waits and number >= _FIRST and number % _EVERY:
            grads = []
        self._seen = [(grad, grad._version, _numbers(grad)) for grad in grads]

    def factor(self) -> float | None:
        """Return the factor, 1.0 if nothing was scaled; None if it cannot be told. Gradients are let go."""
        seen, self._seen = self._seen, []
        if all(grad._version == version for grad, version, _ in seen):
            return 1.0 if seen else None
        return _common_factor(
            [pair for grad, _, before in seen for pair in zip(before, _numbers(grad), strict=False)]
        )


def _numbers(grad: Tensor) -> list[float]:
    numbers: list[float] = local(grad.detach()).reshape(-1)[:_NUMBERS].double().tolist()
    return numbers


def _common_factor(pairs: list[tuple[float, float]]) -> float | None:
    """Return the one factor between the numbers of all pairs; None if there is none, or too few numbers tell it."""
    usable = [(a, b) for a, b in pairs if a and math.isfinite(a) and math.isfinite(b)]
    if len({abs(a) for a, _ in usable}) < _DISTINCT:
        return None
    ratios = [b / a for a, b in usable]
    return ratios[0] if min(ratios) > 0 and max(ratios) <= min(ratios) * _SPREAD else None
