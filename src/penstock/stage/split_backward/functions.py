"""Functions as layers: ``torch.relu``, ``lambda x: x.flatten(1)``; they have no weights."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.base.errors import SplitError
from penstock.stage.values import flatten


def takes_a_value(function: Callable[..., Any]) -> bool:
    """Return whether a callable requires an argument: then it is a layer; otherwise it builds one.

    C functions without a signature, such as ``torch.relu``, are layers; a class never is.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return not inspect.isclass(function)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.default is p.empty and p.kind in positional for p in parameters)


class FunctionLayer(nn.Module):
    """A layer that calls a function of the value; the function's other parameters take named values."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function
        self._checked = False

        @functools.wraps(function)
        def forward(*args: Any, **named: Any) -> Any:
            if self._checked or torch.compiler.is_compiling():
                return function(*args, **named)
            with _NoWeights(name, (args, named)):
                result = function(*args, **named)
            self._checked = True
            return result

        self.forward = forward  # with the signature of the function, which lists the named values it takes

    def extra_repr(self) -> str:
        return getattr(self._function, "__name__", repr(self._function))


class _NoWeights(TorchFunctionMode):
    """Mode that raises for a use of a trained tensor that is not an input."""

    def __init__(self, name: str, inputs: object) -> None:
        super().__init__()
        self._name = name
        self._inputs = {id(leaf) for leaf in flatten(inputs)[0]}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in flatten((args, kwargs))[0]:
            if isinstance(leaf, nn.Parameter) or (
                isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad
            ):
                if id(leaf) in self._inputs:
                    continue
                raise SplitError(
                    f"layer {self._name!r} is a function that uses a weight of shape {tuple(leaf.shape)}; a pipeline trains "
                    "the weights of modules only, so give the nn.Module itself, or write one that holds the weight"
                )
        return func(*args, **(kwargs or {}))
