"""How a stage hands its inputs to its layers: as they are, as views, or as copies for layers that write into them.

A stage's inputs are leaves, into which autograd lets nobody write; what is recomputed must find its inputs as they were;
and two stages may have been handed the same memory. So the first microbatch of each run of layers gets copies, whose
version counters tell afterwards whether anything was written. Layers that write get copies from then on, all others the
inputs themselves.

A leaf is not what the layers get in the whole model: autocast casts a leaf that requires a gradient once and adds up the
gradients of its uses in the lower precision, where it casts other tensors at every use; a leaf's gradient is laid out as
the leaf is; and hooks set on a leaf stay when it is used again. So the layers get views where anything is cast, where a
gradient comes in another layout, and where they run again. Elsewhere leaves do, and are cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.stage.compute.footprint import Footprint
from penstock.stage.compute.recompute import Segment
from penstock.stage.values import Collecting, Message

_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"  # autograd's words


class InPlace:
    """What a stage knows of its segments.

    Attributes:
        as_they_are: (start, stop, training) of the segments that get their inputs without more ado.
        watches: whether the segment that runs now is watched, so that `ran` has to be called.
        footprint: counts what the forward that runs now keeps; None if nothing does.
        needs_views: whether the layers must get views of leaves; None before the first backward has shown it.
    """

    def __init__(self) -> None:
        self.as_they_are: set[tuple[int, int, bool]] = set()
        self.watches = False
        self.footprint: Footprint | None = None
        self.needs_views: bool | None = None
        self._casts = self._restrides = False
        self._writes: dict[tuple[int, int, bool], bool] = {}
        self._key = (0, 0, True)
        self._copies: list[tuple[Tensor, Tensor, int]] | None = None
        self._unwritten: list[tuple[Tensor, int]] | None = None
        self._same: list[tuple[Tensor, Tensor]] = []

    def handing(
        self, segment: Segment, training: bool, inputs: Iterable[Message]
    ) -> Callable[[Tensor], Tensor] | None:
        """How to hand a segment its inputs: through a function that copies them, or, if None, as they are."""
        self._key = key = (segment.start, segment.stop, training)
        self._copies = self._unwritten = self.footprint = None
        self._same = []
        self.watches = True
        writes = self._writes.get(key)
        if writes is None:
            self._copies = []
            return self._watched
        if writes:
            return own
        if not segment.recompute:
            if self.needs_views is False:
                self.as_they_are.add(key)
                return None
        elif torch.is_grad_enabled():
            leaves = [leaf for message in inputs for leaf in message.leaves if isinstance(leaf, Tensor)]
            self._unwritten = [(leaf, _version(leaf)) for leaf in leaves]
        return _view

    def ran(self) -> None:
        """The segment has run.

        Raises:
            PenstockError: it wrote into what it will be given again, which it had not done before.
        """
        self.watches = False
        if self._unwritten is not None:
            if any(_version(leaf) != version for leaf, version in self._unwritten):
                self._writes[self._key] = True
                raise PenstockError(
                    "a recomputed layer wrote in place into what it was given, which it had not done for the first "
                    "microbatch, so its second forward would see other numbers; write x = x + 1 instead of x.add_(1), or "
                    "begin with x = x.clone()"
                )
            self._unwritten = None
        elif self._copies is not None:
            copies, self._copies = self._copies, None
            written = any(_version(copy) != version for copy, _, version in copies)
            # Within torch.inference_mode nothing counts versions.
            if not any(copy.is_inference() for copy, _, _ in copies):
                self._writes[self._key] = written
            self._same = [(copy, given) for copy, given, version in copies if _version(copy) == version]
            if self.footprint is not None and not written:
                for copy, original in self._same:
                    self.footprint.replace(copy, original)

    def with_originals(self, outputs: Sequence[Message]) -> tuple[Message, ...]:
        """The outputs of the segment that has run, where inputs that it passed on are no copies but those given."""
        if not self._same:
            return tuple(outputs)
        given = {(copy.data_ptr(), copy.shape): original for copy, original in self._same}
        self._same = []

        def original(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
                return leaf
            found = given.get((leaf.data_ptr(), leaf.shape))
            return leaf if found is None else found.detach()

        return tuple(message._replace(leaves=tuple(map(original, message.leaves))) for message in outputs)

    def failed(self, error: BaseException) -> None:
        """The segment raised; if it wrote into a leaf, say why, and hand it copies from now on."""
        self._copies = self._unwritten = self.footprint = None
        self.watches = False
        if isinstance(error, RuntimeError) and _LEAF in str(error):
            self._writes.update(dict.fromkeys(self._writes, True))
            self.as_they_are.clear()
            error.add_note(
                "If the tensor is what the layer was given: it was not written to in the first microbatch, so it was not "
                "copied; write x = x + 1 instead of x.add_(1), or begin with x = x.clone()"
            )

    def look_for_casts(self, graph: Iterable[Any]) -> None:
        """Look for casts among the nodes of a first graph."""
        self._casts = self._casts or any(node.name() == "ToCopyBackward0" for node in graph)

    def look_at_layouts(self, collecting: Collecting) -> None:
        """Compare the layouts of a first backward's gradients with those of the leaves they belong to."""
        self._restrides = self._restrides or not collecting.laid_out_alike

    def decide(self) -> None:
        """End the first backward: from now on it is known whether the layers must get views."""
        self.needs_views = self._casts or self._restrides

    def _watched(self, tensor: Tensor) -> Tensor:
        copy = own(tensor)
        assert self._copies is not None
        self._copies.append((copy, tensor, _version(copy)))
        return copy


def _view(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


def own(tensor: Tensor) -> Tensor:
    """A copy with the same strides, on which the kernels that a layer runs depend; its gradient is the tensor's."""
    copy = tensor.clone()
    if tensor.layout is not torch.strided or tensor.is_nested or copy.stride() == tensor.stride():
        return copy
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor  # expanded, which nobody can write to as a whole
    with torch.no_grad():
        place = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return place.copy_(tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
