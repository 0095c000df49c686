"""Tied weights: one parameter under several names, found by identity or declared by the layers, and equal on all ranks.

`penstock.runtime.weights.shared` sums their gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from penstock.base.errors import SplitError
from penstock.runtime.weights.lending import Lent
from penstock.schedule.placement import Placement
from penstock.stage.devices import move_own
from penstock.stage.layers import Layer, prefixes, whole_name
from penstock.stage.module import StageModule


def find_ties(layers: Sequence[Layer]) -> list[tuple[str, ...]]:
    """Return groups of whole-model names that are one parameter, each in the order of the layers.

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


def set_parameter(owner: nn.Module, inner: str, parameter: nn.Parameter, name: str) -> nn.Parameter:
    """Replace a module's parameter, which has this name in the whole model; return the replaced one."""
    before: nn.Parameter = getattr(owner, inner)
    if before.shape != parameter.shape or before.dtype != parameter.dtype:
        raise SplitError(
            f"{name} cannot be tied: it is {before.dtype} of shape {tuple(before.shape)}, and its owner's parameter is "
            f"{parameter.dtype} of shape {tuple(parameter.shape)}"
        )
    setattr(owner, inner, parameter)
    return before


class Ties:
    """Tied weights of a model split into stages.

    Args:
        own_names: names of the model's parameters as its ``named_parameters`` gives them (default none).

    Attributes:
        groups: names of each tied weight; the first is the model's own name of it, the others are in the layers' order.
        holders: ranks that hold each group, in the order of the layers; the copy of the first one counts.
    """

    def __init__(
        self,
        layers_of_stages: Sequence[Sequence[Layer]],
        placement: Placement,
        own_names: Collection[str] = (),
    ) -> None:
        layers = [layer for of_stage in layers_of_stages for layer in of_stage]
        stage_of = {layer.name: s for s, of_stage in enumerate(layers_of_stages) for layer in of_stage}
        found = find_ties(layers)
        self._stage = {name: stage_of[owner_of(name, layers) or ""] for names in found for name in names}
        self.stages = [tuple(dict.fromkeys(self._stage[n] for n in names)) for names in found]
        self.groups = [tuple(sorted(names, key=lambda n: n not in own_names)) for names in found]
        self.first = {name: names[0] for names in self.groups for name in names[1:]}
        self.holders = [
            tuple(dict.fromkeys(rank for s in stages for rank in placement.holders[s]))
            for stages in self.stages
        ]
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []

    def apply(
        self, modules: Mapping[tuple[int, int], StageModule], devices: Sequence[torch.device] = ()
    ) -> list[Lent]:
        """Make each group one parameter in this process, on the device of the first rank that holds it.

        Args:
            devices: device of each rank, where they differ (default none).

        Returns:
            What the other ranks of this process use in a step in its place: parameters of the same memory, or copies on
            other devices, whose gradients autograd accumulates apart.
        """
        lent = []
        for names, holders in zip(self.groups, self.holders, strict=True):
            first: nn.Parameter | None = None
            for rank in holders:
                here = [
                    (modules[rank, self._stage[n]], n) for n in names if (rank, self._stage[n]) in modules
                ]
                if not here:
                    continue
                owner, inner = here[0][0].find(here[0][1])
                device = devices[rank] if devices else None
                if first is None:
                    if device is not None:  # a later rank's stage may have taken it to its own
                        move_own(owner, device)
                    first = own = getattr(owner, inner)
                else:
                    own = nn.Parameter(first.detach().to(device), requires_grad=first.requires_grad)
                for module, name in here:
                    owner, inner = module.find(name)
                    before = set_parameter(owner, inner, first, name)
                    if before is not first:
                        self._replaced.append((owner, inner, before))
                    if own is not first:
                        lent.append(Lent(owner._parameters, inner, own))
        return lent

    def undo(self) -> None:
        """Give the modules their original parameters back."""
        for owner, inner, before in reversed(self._replaced):
            # A conversion of the model has not reached the original.
            before.data = getattr(owner, inner).data.to(before.device)
            setattr(owner, inner, before)
        self._replaced.clear()

    @property
    def over_stages(self) -> list[str]:
        """All names of the weights that several stages have."""
        groups = zip(self.groups, self.stages, strict=True)
        return [name for names, stages in groups if len(stages) > 1 for name in names]

    def __bool__(self) -> bool:
        return bool(self.groups)
