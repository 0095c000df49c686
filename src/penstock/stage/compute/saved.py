"""State that a stage keeps of a microbatch between its forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import PenstockError
from penstock.stage.compute.recompute import Segment
from penstock.stage.compute.runner import LossInputs, Messages, SegmentOutput
from penstock.stage.split_backward.weight_grad import WeightGradQueue
from penstock.stage.values import InputGrads, same_values


class SavedGraph(NamedTuple):
    """A segment whose graph is kept: the collectors of its input gradients, and the roots of its backward."""

    input_grads: InputGrads
    roots: tuple[Any, ...]  # gradient edges; on the last stage the weighted loss

    def backward(self, grads: Sequence[Tensor | None] | None, stage: int, microbatch: int) -> None:
        """Run the backward of the segment.

        Args:
            grads: gradient of each root, None for a root without one; None instead of the list to start from the loss.
        """
        if grads is None:
            if self.roots:
                torch.autograd.backward(self.roots)
            return
        if len(grads) != len(self.roots):
            raise PenstockError(
                f"stage {stage}, microbatch {microbatch}: {len(grads)} gradient(s) came back for {len(self.roots)} "
                "output(s) that need one"
            )
        pairs = [(r, g) for r, g in zip(self.roots, grads, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])


class SavedInputs(NamedTuple):
    """A segment that runs again before its backward.

    Attributes:
        buffers: values of its changing buffers before the first forward.
        output: result of the first forward, to compare with; None after the first microbatch.
    """

    segment: Segment
    inputs: Messages
    buffers: list[Tensor]
    loss_inputs: LossInputs | None
    output: SegmentOutput | None


class SavedMicrobatch(NamedTuple):
    """State for the backward of one microbatch."""

    segments: list[SavedGraph | SavedInputs]
    grad_counts: tuple[int, ...]  # number of leaves in each input message that collect a gradient
    queue: WeightGradQueue | None


class LayerBytes(NamedTuple):
    """Memory that one layer keeps for one microbatch.

    Attributes:
        kept: bytes from its forward to its backward if it is not recomputed.
        inputs: bytes of its inputs, all that it keeps if it is recomputed.
    """

    kept: int
    inputs: int


def require_same(first: SegmentOutput, again: SegmentOutput, layers: Sequence[str]) -> None:
    """Compare the first output of a recomputed segment with its second."""
    one, other = _tensors(first), _tensors(again)
    if len(one) == len(other) and all(same_values(a, b) for a, b in zip(one, other, strict=True)):
        return
    names = ", ".join(map(repr, layers))
    raise PenstockError(
        f"layer {names} returns something else when it runs again for its backward: it keeps state in Python, or draws from "
        "its own generator, which a second forward changes again. Keep that state in buffers and draw by torch's "
        "functions, or use recompute='none'"
    )


def _tensors(output: SegmentOutput) -> list[Tensor]:
    leaves = [x for message in output.messages for x in message.leaves if isinstance(x, Tensor) and x.numel()]
    if output.report is not None and output.report.loss is not None:
        leaves.append(output.report.loss)
    return leaves
