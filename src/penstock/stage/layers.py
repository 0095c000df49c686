"""A model as an ordered list of named layers, built only where they are needed.

Whatever a user hands over (an ``nn.Sequential``, a list of modules, a list of factories, named or not) becomes a list
of `Layer`, and from here on nothing else is looked at. A parameter's name is the layer's name, a dot, and its name
within the layer, whatever the split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from penstock.errors import SplitError

Role = Literal["embedding", "block", "head"]


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        name: unique; the prefix of its parameters' names. Dots are allowed, as in ``blocks.3``.
        build: makes the module; called once, and only in a process that holds the layer.
        role: blocks are what an even split counts; an embedding rides along with the first block and a head
            with the last.
        tied: own parameter names (within the layer) that are one with a parameter of an earlier layer: → that one's
            name in the whole model.
        module: what `build` returns, if it is there already.
    """

    name: str
    build: Callable[[], nn.Module]
    role: Role = "block"
    tied: Mapping[str, str] = field(default_factory=dict)
    module: nn.Module | None = None


def as_layers(model: object) -> list[Layer]:
    """Turn what the user gave into layers.

    Args:
        model: an ``nn.Sequential``; or a list of modules, of callables without arguments that return one, of
            ``(name, module or callable)`` pairs, or of `Layer`.

    Raises:
        SplitError: it is none of these, is empty, or has a name twice.
    """
    if isinstance(model, nn.Sequential):
        # named_children would leave out a layer that stands twice.
        everything = model.named_modules(remove_duplicate=False)
        layers = [_layer(name, module) for name, module in everything if name and "." not in name]
    elif isinstance(model, Sequence) and not isinstance(model, str | bytes):
        layers = [_element(n, item) for n, item in enumerate(model)]
    else:
        raise SplitError(
            f"cannot cut a {type(model).__name__} into stages; give an nn.Sequential, or a list of "
            "layers, of functions that build them, or of (name, layer) pairs"
        )
    if not layers:
        raise SplitError("the model has no layers")
    names = [layer.name for layer in layers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SplitError(f"layer names must be unique; given more than once: {', '.join(twice)}")
    return layers


def _element(position: int, item: object) -> Layer:
    if isinstance(item, Layer):
        return item
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return _layer(*item)
    return _layer(str(position), item)


def _layer(name: str, item: object) -> Layer:
    if isinstance(item, nn.Module):
        return Layer(name, lambda: item, module=item)
    if callable(item):
        return Layer(name, item)
    raise SplitError(
        f"layer {name!r} is a {type(item).__name__}; a layer is an nn.Module or a function that builds one"
    )
