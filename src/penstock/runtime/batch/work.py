"""What one rank gets for a step, and what it makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.runtime.consensus import Losses
from penstock.stage.compute.runner import LossWeight
from penstock.stage.values import Message, StageState, flatten


@dataclass
class Work:
    """What one rank gets for a step, and what it makes of it.

    Attributes:
        inputs: by microbatch, where the rank holds the first stage: what the first layer takes, or that with the
            step's named values as `StageState`.
        targets, shares: by microbatch, where the rank holds the last stage.
        keep_outputs: whether the last stage's outputs are wanted.
        input_grads: whether the gradients of the inputs are wanted.
        finite: whether NaN and infinity are looked for.
        turn: training steps done before.
        first_microbatch: the number in the global batch of what is microbatch 0 here.
        reduces: whether gradients are to be reduced over replicas in this step.
        digest: of the batch that the process was given, if others of the pipeline may have been given another.
        has_graph: whether a loss that counts has had a graph to start a backward from.
        flags: what all ranks have seen, at the end; see `penstock.runtime.consensus.require_graph`.
        losses: of all ranks at the end.
        outputs, grads: results by microbatch id in the global batch, of the microbatches this rank saw.
    """

    inputs: Sequence[object] = ()
    targets: Sequence[object] = ()
    shares: Sequence[LossWeight] = ()
    keep_outputs: bool = False
    input_grads: bool = False
    finite: bool = True
    turn: int = 0
    first_microbatch: int = 0
    reduces: bool = True
    digest: int | None = None
    has_graph: bool = False
    flags: int = 0
    losses: Losses = field(default_factory=Losses)
    outputs: dict[int, object] = field(default_factory=dict)
    grads: dict[int, Message] = field(default_factory=dict)

    def input(self, microbatch: int) -> Message:
        """A microbatch of the batch, as the first stage takes it."""
        given = self.inputs[microbatch]
        leaves, structure = flatten(given)
        if not self.input_grads:
            return Message(leaves, structure, (False,) * len(leaves))
        # The gradients of the batch itself are meant, not those of named values, which come after it.
        batch = flatten(given.value)[0] if isinstance(given, StageState) else leaves
        wanted = tuple(
            n < len(batch) and isinstance(x, Tensor) and x.is_floating_point() for n, x in enumerate(leaves)
        )
        return Message(
            tuple(x.detach() if need else x for x, need in zip(leaves, wanted, strict=True)),
            structure,
            wanted,
        )
