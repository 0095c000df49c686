"""Tied weights: one parameter under several names, found by identity or declared by the layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from penstock.base.errors import SplitError
from penstock.stage.layers import Layer, prefixes, whole_name
from penstock.stage.module import StageModule


def find_ties(layers: Sequence[Layer]) -> list[tuple[str, ...]]:
    """Return groups of whole-model names that are one parameter, each in model order; the first is the parameter's name.

    Ties are detected by identity among layers given as modules, and declared by `Layer.tied`.
    """
    place = {layer.name: n for n, layer in enumerate(layers)}
    group: dict[str, list[str]] = {}

    def join(first: str, second: str) -> None:
        one, other = group.setdefault(first, [first]), group.setdefault(second, [second])
        if one is not other:
            one += other
            group.update(dict.fromkeys(other, one))

    names: dict[int, str] = {}
    for layer in layers:
        if layer.module is not None:
            for inner, parameter in layer.module.named_parameters(remove_duplicate=False):
                name = whole_name(layer.name, inner)
                join(names.setdefault(id(parameter), name), name)
    for layer in layers:
        for inner, other in layer.tied.items():
            owner = owner_of(other, layers)
            if owner is None or place[owner] > place[layer.name]:
                raise SplitError(
                    f"layer {layer.name!r} says that its {inner} is tied to {other!r}, which no layer before it has"
                )
            join(other, whole_name(layer.name, inner))
    unique = {id(tied): tied for tied in group.values() if len(tied) > 1}
    return [tuple(sorted(tied, key=lambda n: place[owner_of(n, layers) or ""])) for tied in unique.values()]


def owner_of(name: str, layers: Sequence[Layer]) -> str | None:
    """Return the name of the layer that owns a parameter, by its whole-model name: the longest that fits."""
    starts = {start: layer.name for layer in layers for start in prefixes(layer.name)}
    fitting = [start for start in starts if name == start or name.startswith(f"{start}.")]
    return starts[max(fitting, key=len)] if fitting else None


def set_parameter(module: StageModule, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Replace the parameter of this whole-model name; return the replaced one."""
    owner, inner = module.find(name)
    before: nn.Parameter = getattr(owner, inner)
    if before.shape != parameter.shape or before.dtype != parameter.dtype:
        raise SplitError(
            f"{name} cannot be tied: it is {before.dtype} of shape {tuple(before.shape)}, and its owner's parameter is "
            f"{parameter.dtype} of shape {tuple(parameter.shape)}"
        )
    setattr(owner, inner, parameter)
    return before
