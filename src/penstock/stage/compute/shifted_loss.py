"""Loss functions that shift their targets, and the same losses of targets that were shifted before.

Where context parallelism divides the tokens of a sample, the next token's target may be another process's. So targets are
shifted before they are cut, and the loss is one that does not shift.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from penstock.stage.microbatches import Microbatches

_Function = TypeVar("_Function", bound=Callable[..., Any])


def shifts(without: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Return a decorator of a function that shifts its targets, and otherwise is `without`."""

    def mark(function: _Function) -> _Function:
        vars(function)["without_shift"] = without
        return function

    return mark


def without_shift(loss_fn: Any, reduction: Any) -> tuple[Any, Any] | None:
    """Return a loss function and a reduction for targets that were shifted; None if the loss does not shift them."""
    other = getattr(loss_fn, "without_shift", None)
    if other is None:
        return None
    if getattr(reduction, "__self__", None) is loss_fn:  # a method that counts its targets
        return other, getattr(other, reduction.__name__)
    return other, getattr(reduction, "without_shift", reduction)


def next_targets(value: object, ignore_index: int) -> Any:
    """Return targets with that of the next token at each position, and one that does not count at the last."""
    if isinstance(value, Microbatches):
        return Microbatches([next_targets(each, ignore_index) for each in value.parts])
    return _pytree.tree_map(partial(_next, ignore_index=ignore_index), value)


def _next(leaf: object, ignore_index: int) -> object:
    if not isinstance(leaf, Tensor) or leaf.dim() < 2:
        return leaf
    return torch.cat([leaf[:, 1:], leaf.new_full(leaf[:, :1].shape, ignore_index)], 1)
