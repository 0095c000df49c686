"""One rank's share of a step: its microbatches, the step's options, and the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.consensus import Losses
from penstock.stage.compute.runner import LossWeight
from penstock.stage.values import Message, StageState, flatten, leaves_of, share


@dataclass(frozen=True)
class StepOptions:
    """Options of one step, the same on every rank.

    Attributes:
        number: training steps done before this one.
    """

    trains: bool = True
    outputs: bool = False
    input_grads: bool = False
    check_finite: bool = True
    number: int = 0
    reduces: bool = True
    loss_scale: float = 1.0


@dataclass(frozen=True)
class LocalBatch:
    """One pipeline's share of a batch, split into microbatches.

    Attributes:
        inputs: inputs of the first stage by microbatch, as `StageState` if the step has named values; empty if this
            process does not hold the first stage.
        rows_in, rows_out: rows of each input and of each target; empty if unknown.
        first: number of the first microbatch within the global batch.
        target_tensors: tensors of the whole target, if tensors of the batch share memory; None if they do not.
        digest: digest of the batch that this process was given, if other processes may have been given another one.
    """

    inputs: Sequence[object] = ()
    targets: Sequence[object] = ()
    weights: Sequence[LossWeight] = ()
    rows_in: tuple[int, ...] = ()
    rows_out: tuple[int, ...] = ()
    first: int = 0
    target_tensors: Sequence[Tensor] | None = None
    ignore_index: int = -100
    digest: int | None = None

    def ignored_index(self, number: int) -> int | None:
        """Return the ignored index if no target of a microbatch counts, by its number in the global batch.

        In rows of labels that the loss may shift, the first one does not count either.
        """
        if not self.targets:
            return None
        ignored = [each == self.ignore_index for each in class_targets(self.targets[number - self.first])]
        nothing = any(bool(each.all()) or (each.dim() == 2 and bool(each[:, 1:].all())) for each in ignored)
        return self.ignore_index if nothing else None


def class_targets(target: object) -> list[Tensor]:
    """Return the leaves of a target that may have an ignored index: tensors of integers."""
    integers = (torch.int64, torch.int32, torch.int16)
    return [leaf for leaf in leaves_of(target) if isinstance(leaf, Tensor) and leaf.dtype in integers]


@dataclass
class Work:
    """One rank's share of a step; the executor fills in the results.

    Attributes:
        has_graph: whether a loss that counts had a graph to start a backward from.
        flags: flags of all ranks after the step; see `penstock.runtime.consensus.require_graph`.
        losses: losses of this rank, and of all ranks after the step.
        outputs, grads: outputs and input gradients of this rank, by microbatch number in the global batch.
    """

    batch: LocalBatch = field(default_factory=LocalBatch)
    options: StepOptions = field(default_factory=StepOptions)
    has_graph: bool = False
    flags: int = 0
    losses: Losses = field(init=False)
    outputs: dict[int, object] = field(default_factory=dict)
    grads: dict[int, Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.losses = Losses(rows_in=self.batch.rows_in, rows_out=self.batch.rows_out)

    def input(self, microbatch: int) -> Message:
        """Return a microbatch as the first stage takes it."""
        value = self.batch.inputs[microbatch]
        every, structure = flatten(value)
        wants_grads = self.options.input_grads  # then each leaf gets its own
        leaves: Sequence[Any] = every
        if self.batch.target_tensors is not None:
            leaves, structure = share(
                every, structure, outside=self.batch.target_tensors, once=not wants_grads
            )
        if not wants_grads:
            return Message(tuple(leaves), structure, (False,) * len(leaves))
        # Named values come after the batch, and get no gradients.
        count = len(flatten(value.value)[0] if isinstance(value, StageState) else every)
        needs_grad = tuple(
            n < count and isinstance(leaf, Tensor) and leaf.is_floating_point()
            for n, leaf in enumerate(leaves)
        )
        return Message(
            tuple(leaf.detach() if needs else leaf for leaf, needs in zip(leaves, needs_grad, strict=True)),
            structure,
            needs_grad,
        )
