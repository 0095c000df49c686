"""Check that a stage trains its own parameters alone and leaves shared buffers as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import PenstockError
from penstock.stage.compute.module_buffers import Mark

Foreign = tuple[nn.Module, str, str]
"""A parameter of another stage: its module, its name there, and its name in the whole model."""


class Isolation:
    """A check that a stage trains only its own parameters, and does not change shared buffers.

    A parameter that a layer uses without owning it, such as one kept in a plain list, would be trained by one rank and used
    by another. A buffer of a module that is used on two ranks has a copy on each. Neither can give the results of plain
    PyTorch, so both raise an error with the name, in the first step in which they matter.

    Args:
        buffers: (name in the whole model, owner, name in the owner) of buffers that other ranks have copies of.

    Attributes:
        loss: (name, owner, name in the owner) of the buffers of a loss function that other ranks or replicas call, too.
    """

    def __init__(
        self, foreign: Mapping[int, Foreign] | None = None, buffers: Sequence[tuple[str, nn.Module, str]] = ()
    ) -> None:
        self._foreign = {} if foreign is None else foreign
        self._buffers = buffers
        self._before: list[Tensor] = []
        self.copied: Sequence[tuple[str, Tensor]] = ()
        self._versions: list[int] = []
        self.loss: Sequence[tuple[str, nn.Module, str]] = ()
        self._loss_before: list[Mark] = []

    def begin(self) -> None:
        """Start a step."""
        self._before = [owner.get_buffer(name).clone() for _, owner, name in self._buffers]
        self._versions = [parameter._version for _, parameter in self.copied]
        self._loss_before = [Mark(owner.get_buffer(name)) for _, owner, name in self.loss]

    def require_constant(self) -> None:
        """Check that no forward of this step changed a shared buffer or wrote into a parameter with copies."""
        for (name, owner, inner), before in zip(self.loss, self._loss_before, strict=True):
            if not before.holds(owner.get_buffer(inner)):
                raise PenstockError(
                    f"the loss function changes its buffer {name}, and each replica or copy of the last stage calls it with "
                    "other microbatches; make it part of the last layer, or use a schedule and mesh without copies"
                )
        for (name, parameter), version in zip(self.copied, self._versions, strict=True):
            if parameter._version != version:
                raise PenstockError(
                    f"the forward writes into parameter {name} (nn.Embedding(max_norm=...) does so), and its copies on "
                    "other ranks or replicas would differ; do it after the optimizer's step, on all of them"
                )
        for (name, owner, inner), value in zip(self._buffers, self._before, strict=True):
            if not torch.equal(owner.get_buffer(inner), value):
                raise PenstockError(
                    f"the forward changes buffer {name}, whose module is used at several places on several ranks; each "
                    "rank's copy would differ. Keep these places on one rank (split=...), or put the module in eval mode"
                )

    def require_own_leaves(self, nodes: Iterable[Any]) -> None:
        """Check that a graph does not end in a parameter of another stage."""
        for node in nodes if self._foreign else ():
            leaf = getattr(node, "variable", None)  # only nodes that accumulate into a leaf have one
            known = None if leaf is None else self._foreign.get(id(leaf))
            # Numbers of objects that are gone are given to new ones. No weak reference tells, since tensors that have one
            # cannot be put on the meta device as the objects that they are.
            if known is not None and getattr(known[0], known[1], None) is leaf:
                raise PenstockError(
                    f"a layer or the loss uses the parameter {known[2]} of another stage without owning it; register it in "
                    "the layer, too (self.weight = other.weight), so that it is known as tied, or keep both layers on one "
                    "stage (split=...); for a penalty on weights, see docs/troubleshooting.md"
                )
