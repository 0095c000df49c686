"""How a step ends: on every rank or on none, with every loss known to all.

Each rank reports to the collector, which holds the last stage, that its ops are done, with the losses it saw and
with the first number it found that is not finite; the collector answers with all losses and one verdict. A rank that
failed has sent its failure instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.encoding import sendable
from penstock.errors import BatchError, NonFiniteError, PenstockError, StageError
from penstock.parallel.dtensor import local, real_values
from penstock.runtime.transport.channel import Channel
from penstock.stage.compute.stage import Stage
from penstock.stage.values import Message

_GIVEN, _ROWS, _LOSS, _GRADIENT, _WEIGHT = range(5)

TRAINABLE, COUNTED, GRAPH = 1, 2, 4
"""What a rank saw in a step: a parameter that requires gradients, a loss that counts, such a loss with a graph."""


@sendable
class Refusal(NamedTuple):
    """Why a step is refused on every rank; the smaller one of two is nearer to where it began.

    Attributes:
        kind: batches that differ over the ranks, rows of input and target that differ, or NaN or infinity in a loss, a
            gradient handed back, or a weight's gradient.
        depth: how many stages before the last one.
        microbatch: which; -1 for a weight.
    """

    kind: int
    depth: int
    microbatch: int


@dataclass
class Losses:
    """What the last stage reported.

    Attributes:
        total: by microbatch id, 0-d tensors.
        parts: by microbatch id, and by name.
        weights: how much each microbatch counts, by microbatch id; they sum to 1, unless losses are summed.
        rows_in, rows_out: rows of the input and of the target by microbatch; empty where they are not known.
    """

    total: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    rows_in: tuple[int, ...] = ()
    rows_out: tuple[int, ...] = ()

    def update(self, other: Losses) -> None:
        """Add those of another rank."""
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
    sharded_grads: Callable[[int], list[Tensor]] | None = None,
) -> Refusal | None:
    """The first number of a rank's step that is NaN or infinite; forgets the stages' suspects.

    Args:
        stages: of this rank, by number.
        losses: those it saw.
        last: number of the last stage.
        first: the number in the global batch of what is microbatch 0 here.
        sharded_grads: by stage, the gradients that are elsewhere than in its parameters.
    """
    found: list[Refusal] = []
    counting = {n: loss for n, loss in losses.total.items() if losses.weights.get(n, 1.0)}
    found += [Refusal(_LOSS, 0, n) for n in _nonfinite(counting.items())]
    for s, stage in stages.items():
        found += [Refusal(_GRADIENT, last - s, first + n) for n in _nonfinite(stage.finite_sums)]
        stage.finite_sums.clear()
        grads = [real_values(local(p.grad)) for p in stage.module.parameters() if p.grad is not None]
        grads += sharded_grads(s) if sharded_grads is not None else []
        if grads and not bool(torch.nn.utils.get_total_norm(grads).isfinite()):
            found.append(Refusal(_WEIGHT, last - s, -1))
    return min(found, default=None)


def _nonfinite(numbers: Iterable[tuple[int, Tensor]]) -> list[int]:
    """The microbatches whose number is not finite; looked at all at once, which waits for a device only once."""
    pairs = list(numbers)
    if not pairs:
        return []
    values = [number for _, number in pairs]
    if any(value.dtype is not torch.float32 for value in values):
        values = [_narrowed(value) for value in values]
    finite = torch.stack(values).isfinite().tolist()
    return [n for (n, _), good in zip(pairs, finite, strict=True) if not good]


def _narrowed(number: Tensor) -> Tensor:
    """A float32 that is finite if the number is; float64 has numbers that float32 has not."""
    return (number * 0 if number.dtype is torch.float64 else number).float()


def explain(finding: Refusal, losses: Losses, last: int, step: int) -> PenstockError:
    """The error that every rank raises."""
    if finding.kind == _GIVEN:
        return BatchError(
            f"step {step}: the processes of a pipeline were given different batches; the first stage's rank takes its x and "
            "the last one's its y, which must belong together. Seed the shuffling alike on every process, or give x and y "
            "only where they are needed and None elsewhere. No weight was changed; zero the gradients before the next step"
        )
    if finding.kind == _ROWS:
        return BatchError(
            f"step {step}: the target's microbatches have {list(losses.rows_out)} rows, the input's "
            f"{list(losses.rows_in)}; both are cut along dimension 0, the batch. No weight was changed; zero the "
            "gradients before the next step"
        )
    stage = last - finding.depth
    what = {
        _LOSS: f"the loss of microbatch {finding.microbatch}",
        _GRADIENT: f"the gradient that stage {stage} handed back for microbatch {finding.microbatch}",
        _WEIGHT: f"the gradient of a weight of stage {stage}",
    }[finding.kind]
    return NonFiniteError(
        f"step {step}: {what} is NaN or infinite. No weight was changed; zero the gradients before the next step. A "
        "lower learning rate, a longer warm-up or clipping usually helps; with float16 use a GradScaler",
        stage,
        finding.microbatch,
        what,
    )


def agree(
    channel: Channel | None,
    rank: int,
    collector: int,
    ranks: int,
    tag: int,
    losses: Losses,
    finding: Refusal | None,
    flags: int,
) -> tuple[Refusal | None, int]:
    """End the step: `losses` become those of all ranks; returns the finding nearest to where it began, and all flags.

    Args:
        channel: to the other ranks; None if there are none.
        rank, collector, ranks: this rank, the one that collects, and how many there are.
        tag: of the messages.
        losses: those this rank saw; filled in.
        finding: this rank's.
        flags: what this rank saw: `TRAINABLE`, `COUNTED`, `GRAPH`; 0 in an evaluation.
    """
    if channel is None:
        return finding, flags
    # Of one process all ranks have what they need to know already, and to read a loss would be to wait for a GPU.
    told = Losses() if channel.one_process else losses
    if rank != collector:
        channel.send(collector, tag, _pack(told, finding, flags))
        return _unpack(channel.recv(collector, tag), losses)
    others = [r for r in range(ranks) if r != collector]
    found = [finding]
    for r in others:
        theirs, seen = _unpack(channel.recv(r, tag), losses)
        found.append(theirs)
        flags |= seen
    verdict = min((f for f in [*losses.uneven, *found] if f is not None), default=None)
    if not channel.one_process:
        told = losses
    for r in others:
        channel.send(r, tag, _pack(told, verdict, flags))
    return verdict, flags


_SEEN, _BITS = 3, 28  # of flags: how many come first, and how many a digest and its complement have


def marks_of(digest: int | None) -> int:
    """Flags that, put together with those of another digest, show that it is another one; 0 of None."""
    if digest is None:
        return 0
    mask = (1 << _BITS) - 1
    return (digest & mask | (~digest & mask) << _BITS) << _SEEN


def compare_marks(flags: int, finding: Refusal | None) -> tuple[Refusal | None, int]:
    """The finding that some rank was given another batch, or the one there was; and the flags without the marks."""
    one, other = flags >> _SEEN & (1 << _BITS) - 1, flags >> _SEEN + _BITS
    return Refusal(_GIVEN, 0, 0) if one & other else finding, flags & (1 << _SEEN) - 1


def require_graph(flags: int, step: int) -> None:
    """Refuse a step whose losses have no graph, though there is something to train.

    Args:
        flags: what all ranks of all replicas saw; 0 in an evaluation.
        step: its number.

    Raises:
        StageError: losses counted, none of them had a graph, and there are parameters that require gradients.
    """
    if flags == TRAINABLE | COUNTED:
        raise StageError(
            f"step {step}: no microbatch's loss has a graph (its requires_grad is False), though there are parameters that "
            "require gradients, so nothing would train. Look for .detach(), .item(), .data or torch.no_grad() in loss_fn "
            "and in the layers; to compute the loss alone use Pipeline.evaluate"
        )


def _pack(losses: Losses, finding: Refusal | None, flags: int) -> Message:
    """Names are plain leaves, which travel only when they change; everything else is in tensors."""
    ids = sorted(losses.total)
    names = sorted({name for part in losses.parts.values() for name in part})
    leaves = (
        torch.tensor(ids, dtype=torch.int64),
        _column([losses.total[n] for n in ids]),
        torch.tensor([losses.weights.get(n, 1.0) for n in ids], dtype=torch.float64),
        torch.tensor((flags, *(finding or ())), dtype=torch.int64),
        torch.tensor(losses.rows_in, dtype=torch.int64),
        torch.tensor(losses.rows_out, dtype=torch.int64),
        *(_column([losses.parts[n].get(name, _ABSENT) for n in ids]) for name in names),
        *names,
    )
    return Message(leaves, None, (False,) * len(leaves))


_ABSENT = torch.tensor(0.0)


def _column(losses: Sequence[Tensor]) -> Tensor:
    return torch.cat([loss.cpu().reshape(1) for loss in losses]) if losses else torch.empty(0)


def _unpack(message: Message, losses: Losses) -> tuple[Refusal | None, int]:
    ids, total, weights, verdict, rows_in, rows_out, *rest = message.leaves
    losses.rows_in = losses.rows_in or tuple(rows_in.tolist())
    losses.rows_out = losses.rows_out or tuple(rows_out.tolist())
    names = rest[len(rest) // 2 :]
    numbers = ids.tolist()
    losses.total.update(zip(numbers, total, strict=True))
    losses.weights.update(zip(numbers, weights.tolist(), strict=True))
    for at, n in enumerate(numbers):
        losses.parts[n] = {name: column[at] for name, column in zip(names, rest, strict=False)}
    flags, *finding = verdict.tolist()
    return Refusal(*finding) if finding else None, flags
