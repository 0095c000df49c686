"""Gradients of a stage's input tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class InputGrads:
    """Input tensors of a stage that collect a gradient.

    Attributes:
        caught: gradients by leaf id, caught before they reach the leaf. A leaf's ``.grad`` gets the layout of the leaf, and
            the kernels of the earlier stages' backwards, and so the last bits, depend on the layout.
        replacements: tensors that the layers get in place of the leaves; kept only while the layers run.
    """

    __slots__ = ("caught", "hooked", "leaves", "nodes", "replacements")

    def __init__(self) -> None:
        self.leaves: tuple[Tensor, ...] = ()
        self.caught: dict[int, Tensor] = {}
        self.replacements: list[Tensor] = []
        self.nodes: tuple[Any, ...] = ()
        self.hooked: tuple[bool, ...] = ()

    def after_forward(self) -> None:
        """Record the hooks that the layers have registered, and keep only the nodes of the replacements."""
        inputs = self.replacements or self.leaves
        for tensor in inputs:
            if tensor._backward_hooks:
                self.hooked = tuple(bool(each._backward_hooks) for each in inputs)
                break
        if self.replacements:
            self.nodes = tuple(tensor.grad_fn for tensor in self.replacements)
            self.replacements.clear()

    @property
    def grads(self) -> list[Tensor | None]:
        """Gradients of the leaves; None for a leaf without one."""
        caught = self.caught
        if not caught:
            return [leaf.grad for leaf in self.leaves]
        return [caught.get(id(leaf), leaf.grad) for leaf in self.leaves]

    @property
    def layouts_match(self) -> bool:
        """True if every leaf's ``.grad`` would have the layout of the gradient that reaches it."""
        return all(
            g is None or _strides(g) == _strides(x) for x, g in zip(self.leaves, self.grads, strict=True)
        )


def _strides(tensor: Tensor) -> object:
    """Return the strides of the dimensions with several elements; the others have no effect."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.layout
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def catch(caught: dict[int, Tensor], leaf: int, grads: tuple[Tensor | None, ...]) -> tuple[None]:
    (grad,) = grads
    if grad is not None:
        before = caught.get(leaf)
        caught[leaf] = grad if before is None else before + grad
    return (None,)  # the leaf itself gets no gradient
