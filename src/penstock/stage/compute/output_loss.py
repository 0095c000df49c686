"""Loss functions of the output alone, as of autoencoders and of models whose forward returns the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class OutputLoss:
    """A loss function of the output alone, called as one that takes a target.

    Attributes:
        function: the loss function, called as ``function(output)``.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, output: Any, target: Any = None) -> Tensor:
        """Return the loss of a microbatch."""
        loss: Tensor = self.function(output)
        return loss


def of_output(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function as one of (output, target), whether it takes a target or not."""
    return loss_fn if takes_target(loss_fn) else OutputLoss(loss_fn)


def takes_target(loss_fn: Callable[..., Any]) -> bool:
    """Return whether a loss function can be called with an output and a target."""
    try:
        signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    except (TypeError, ValueError):  # a function written in C
        return True
    try:
        signature.bind(None, None)
    except TypeError:
        try:
            signature.bind(None)
        except TypeError:
            return True  # it takes more than two, so that the call itself says what is missing
        return False
    return True
