"""What a stage keeps of a microbatch between its forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from penstock.errors import PenstockError
from penstock.stage.compute.recompute import Segment
from penstock.stage.compute.runner import LossInputs, Messages, SegmentOutput
from penstock.stage.split_backward.weight_grad import Queue
from penstock.stage.values import Collecting, same_numbers


class Graph(NamedTuple):
    """A segment whose graph is kept: what collects gradients, and roots to start from."""

    collecting: Collecting
    roots: tuple[Any, ...]  # gradient edges; on the last stage the scaled loss


class Dropped(NamedTuple):
    """A segment that runs again: its inputs, its changing buffers as they were, and for a first one what it returned."""

    segment: Segment
    inputs: Messages
    buffers: list[Tensor]
    ends: LossInputs | None
    found: SegmentOutput | None


class Saved(NamedTuple):
    """What a microbatch's backward needs."""

    parts: list[Graph | Dropped]
    routes: tuple[int, ...]  # how many leaves of each input message collect a gradient
    queue: Queue | None


class LayerBytes(NamedTuple):
    """What one layer keeps for one microbatch.

    Attributes:
        kept: bytes from its forward to its backward if it is not recomputed.
        inputs: bytes of its inputs, which are what it keeps if it is.
    """

    kept: int
    inputs: int


def require_same(first: SegmentOutput, again: SegmentOutput, layers: Sequence[str]) -> None:
    """Compare what a recomputed segment returned at first with what it returns now.

    Raises:
        PenstockError: it differs; names the layers.
    """
    one, other = _numbers(first), _numbers(again)
    if len(one) == len(other) and all(same_numbers(a, b) for a, b in zip(one, other, strict=True)):
        return
    named = ", ".join(map(repr, layers))
    raise PenstockError(
        f"layer {named} returns something else when it runs again for its backward: it keeps state in Python, or draws from "
        "a generator of its own, which a second forward changes again. Keep that state in buffers and draw by torch's "
        "functions, or use recompute='none'"
    )


def _numbers(found: SegmentOutput) -> list[Tensor]:
    leaves = [x for message in found.messages for x in message.leaves if isinstance(x, Tensor) and x.numel()]
    if found.report is not None and found.report.loss is not None:
        leaves.append(found.report.loss)
    return leaves
