"""The state that a stage must not share with the stages of other ranks.

A parameter that a layer uses without owning it, such as one kept in a plain list, would be trained by one rank and used
by another. A buffer of a module that is used on two ranks has a copy on each. Neither can give what plain PyTorch gives,
so both are refused by name, in the first step in which they matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError


class Isolation:
    """Checks that a stage trains its own parameters only, and does not change shared buffers.

    Args:
        foreign: id → name of the model's parameters that the stage does not own.
        buffers: (name in the whole model, owner, name there) of the buffers that other ranks have copies of.

    Attributes:
        copied: (name, parameter) of the parameters that other ranks or replicas have copies of.
        loss: (name, owner, name there) of the buffers of a loss function that other ranks or replicas call, too.
    """

    def __init__(
        self, foreign: Mapping[int, str] | None = None, buffers: Sequence[tuple[str, nn.Module, str]] = ()
    ) -> None:
        self._foreign = {} if foreign is None else foreign
        self._buffers = buffers
        self._before: list[Tensor] = []
        self.copied: Sequence[tuple[str, Tensor]] = ()
        self._versions: list[int] = []
        self.loss: Sequence[tuple[str, nn.Module, str]] = ()
        self._loss_before: list[tuple[Tensor, int]] = []

    def begin(self) -> None:
        """Start a step."""
        self._before = [owner.get_buffer(name).clone() for _, owner, name in self._buffers]
        self._versions = [parameter._version for _, parameter in self.copied]
        buffers = (owner.get_buffer(name) for _, owner, name in self.loss)
        self._loss_before = [(buffer, buffer._version) for buffer in buffers]

    def require_constant(self) -> None:
        """Refuse a forward that has changed a shared buffer, or written into a parameter with copies, in this step.

        Raises:
            PenstockError: it has, or the loss function has changed a buffer; names the buffer or the parameter.
        """
        for (name, owner, inner), (buffer, version) in zip(self.loss, self._loss_before, strict=True):
            now = owner.get_buffer(inner)
            if now is not buffer or now._version != version:
                raise PenstockError(
                    f"the loss function changes its buffer {name}, and each replica or copy of the last stage calls it with "
                    "microbatches of its own; make it part of the last layer, or use a schedule and mesh without copies"
                )
        for (name, parameter), version in zip(self.copied, self._versions, strict=True):
            if parameter._version != version:
                raise PenstockError(
                    f"the forward writes into parameter {name} (nn.Embedding(max_norm=...) does so), of which other ranks "
                    "or replicas have copies that would differ; do it after the optimizer's step, on all of them"
                )
        for (name, owner, inner), before in zip(self._buffers, self._before, strict=True):
            if not torch.equal(owner.get_buffer(inner), before):
                raise PenstockError(
                    f"the forward changes buffer {name}, whose module is used at several places on several ranks; each "
                    "rank's copy would differ. Keep these places on one rank (split=...), or put the module in eval mode"
                )

    def require_own_leaves(self, graph: Iterable[Any]) -> None:
        """Refuse a graph that ends in a parameter of another stage.

        Args:
            graph: its nodes.

        Raises:
            PenstockError: there is such a parameter; names it.
        """
        for node in graph if self._foreign else ():
            leaf = getattr(node, "variable", None)  # of the node that accumulates into a leaf
            if leaf is not None and (name := self._foreign.get(id(leaf))) is not None:
                raise PenstockError(
                    f"a layer uses the parameter {name} of another stage without owning it; register it in the layer, too "
                    "(self.weight = other.weight), so that it is known as tied, or keep both layers on one stage (split=...)"
                )


def graph_of(roots: Iterable[Tensor]) -> set[Any]:
    """The nodes of the autograd graph behind some tensors."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    found: set[Any] = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    return found
