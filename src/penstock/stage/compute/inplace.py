"""Inputs of a stage's layers: passed through, as views, or as copies for layers that write into them.

A stage's inputs are leaves, and autograd refuses writes into a leaf. A recomputed segment must find its inputs unchanged,
and two stages may share the memory of an input. So the first microbatch of each segment gets copies, whose version counters
tell afterwards whether the layers wrote into them. Layers that write get copies from then on, all others the inputs.

In the whole model the layers do not get leaves, and leaves differ: autocast casts a leaf that requires a gradient once and
adds up the gradients of its uses in the lower precision, where it casts other tensors at every use; a leaf's gradient has
the leaf's layout; and hooks on a leaf remain when it is used again. So the layers get views where anything is cast, where a
gradient comes in another layout, and where they run again. Elsewhere they get the leaves, which are cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import PenstockError
from penstock.stage.compute.footprint import Footprint
from penstock.stage.compute.recompute import Segment
from penstock.stage.input_grads import InputGrads
from penstock.stage.values import Message

_LEAF_ERROR = "a leaf Variable that requires grad is being used in an in-place operation"  # autograd's words

_Key = tuple[int, int, int]
"""(start, stop, number of the modules' modes) of a segment."""


class InPlace:
    """Record of the segments of a stage that write into their inputs.

    Attributes:
        passthrough: segments that get their inputs directly, without a call of `input_transform`.
        needs_views: whether the layers must get views of leaves; None before the first backward.
    """

    def __init__(self) -> None:
        self.passthrough: set[_Key] = set()
        self.watching = False
        self.footprint: Footprint | None = None
        self.needs_views: bool | None = None
        self._casts = self._restrides = False
        self._writes: dict[_Key, bool] = {}
        self._key: _Key = (0, 0, 0)
        self._copies: list[tuple[Tensor, Tensor, int]] | None = None
        self._versions: list[tuple[Tensor, int]] | None = None
        self._unwritten: list[tuple[Tensor, Tensor]] = []

    def input_transform(
        self, segment: Segment, modes: int, inputs: Iterable[Message]
    ) -> Callable[[Tensor], Tensor] | None:
        """Return the function to apply to a segment's input tensors; None to pass them through."""
        self._key = key = (segment.start, segment.stop, modes)
        self._copies = self._versions = self.footprint = None
        self._unwritten = []
        self.watching = True
        writes = self._writes.get(key)
        if writes is None:
            self._copies = []
            return self._watched_copy
        if writes:
            return clone_with_strides
        if not segment.recompute:
            if self.needs_views is False:
                self.passthrough.add(key)
                return None
        elif torch.is_grad_enabled():
            leaves = [leaf for message in inputs for leaf in message.leaves if isinstance(leaf, Tensor)]
            self._versions = [(leaf, _version(leaf)) for leaf in leaves]
        return _view

    def after_forward(self) -> None:
        """Check whether the segment that has run wrote into its inputs."""
        self.watching = False
        if self._versions is not None:
            if any(_version(leaf) != version for leaf, version in self._versions):
                self._writes[self._key] = True
                raise PenstockError(
                    "a recomputed layer modified its input in place, but did not for the first microbatch, so recompute "
                    "would start from changed values; write x = x + 1 instead of x.add_(1), or begin with x = x.clone()"
                )
            self._versions = None
        elif self._copies is not None:
            copies, self._copies = self._copies, None
            written = any(_version(copy) != version for copy, _, version in copies)
            # Under torch.inference_mode tensors have no version counter.
            if not any(copy.is_inference() for copy, _, _ in copies):
                self._writes[self._key] = written
            self._unwritten = [
                (copy, original) for copy, original, version in copies if _version(copy) == version
            ]
            if self.footprint is not None and not written:
                for copy, original in self._unwritten:
                    self.footprint.replace(copy, original)

    def with_originals(self, outputs: Sequence[Message]) -> tuple[Message, ...]:
        """Return a segment's outputs with the original in place of every copied input that it passed on."""
        if not self._unwritten:
            return tuple(outputs)
        originals = {(copy.data_ptr(), copy.shape): original for copy, original in self._unwritten}
        self._unwritten = []

        def replace(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
                return leaf
            original = originals.get((leaf.data_ptr(), leaf.shape))
            return leaf if original is None else original.detach()

        return tuple(message._replace(leaves=tuple(map(replace, message.leaves))) for message in outputs)

    def on_error(self, error: BaseException) -> None:
        """Clean up after a segment that raised; if it wrote into a leaf, explain the error and copy inputs from now on."""
        self._copies = self._versions = self.footprint = None
        self.watching = False
        if isinstance(error, RuntimeError) and _LEAF_ERROR in str(error):
            self._writes.update(dict.fromkeys(self._writes, True))
            self.passthrough.clear()
            error.add_note(
                "If the tensor is the layer's input: the layer did not modify it for the first microbatch, so it was not "
                "copied; write x = x + 1 instead of x.add_(1), or begin with x = x.clone()"
            )

    def record_casts(self, graph: Iterable[Any]) -> None:
        """Record whether there is a cast among the nodes of a first graph."""
        self._casts = self._casts or any(node.name() == "ToCopyBackward0" for node in graph)

    def record_layouts(self, input_grads: InputGrads) -> None:
        """Record whether the gradients of a first backward differ in layout from their leaves."""
        self._restrides = self._restrides or not input_grads.layouts_match

    def decide_views(self) -> None:
        """Decide after the first backward whether the layers must get views."""
        self.needs_views = self._casts or self._restrides

    def _watched_copy(self, tensor: Tensor) -> Tensor:
        copy = clone_with_strides(tensor)
        assert self._copies is not None
        self._copies.append((copy, tensor, _version(copy)))
        return copy


def _view(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


def clone_with_strides(tensor: Tensor) -> Tensor:
    """Return a clone with the same strides, on which the choice of kernels depends."""
    copy = tensor.clone()
    if tensor.layout is not torch.strided or tensor.is_nested or copy.stride() == tensor.stride():
        return copy
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor  # expanded, so PyTorch refuses a write into all of it
    with torch.no_grad():
        target = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return target.copy_(tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
