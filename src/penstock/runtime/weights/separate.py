"""Separate modules for ranks of one process that would share one.

A model may use a module at several places. If these are on two ranks, which are threads, both would accumulate into the
same gradient at the same time. So the first rank keeps the user's module, and every other rank gets a copy whose parameters
share the memory. Their gradients are summed as for any tied weight; see `penstock.runtime.weights.shared`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.base.errors import ConfigError
from penstock.runtime.weights.fixed import require_no_late_hook
from penstock.runtime.weights.lending import Lent
from penstock.schedule.placement import Placement
from penstock.stage.compute.isolation import Foreign, Isolation
from penstock.stage.compute.module_buffers import Mark
from penstock.stage.devices import move_own
from penstock.stage.layers import Layer, whole_name
from penstock.stage.module import StageModule

M = TypeVar("M", bound=nn.Module)


def alias(module: M, memo: dict[int, Any] | None = None) -> M:
    """Copy a module; the copy shares its parameters' memory, but has separate gradients and buffers."""
    memo = {} if memo is None else memo
    for name, p in module.named_parameters():
        if id(p) not in memo:
            require_no_late_hook(name, p)  # hooks of the gradient are copied by `Aliases`
            memo[id(p)] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
    for submodule in module.modules():
        # Hooks before a forward (pruning, the older weight_norm) store a computed tensor as an attribute, which deepcopy
        # refuses; the copy's hooks compute it again.
        for value in vars(submodule).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach())
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            f"a {type(module).__name__} needs copies for several ranks in threads, and cannot be copied "
            f"({error}); keep its places on one rank (split=...), remove what cannot be copied from it, or run one "
            "process per rank (torchrun)"
        ) from error


class SeparateModules:
    """Copies of modules that several ranks of one process use.

    Args:
        devices: device of each rank, where they differ (default none).

    Attributes:
        lent: copies that take the place of a module within another one during a step.
        copied: (module, copy) pairs.
    """

    def __init__(
        self, modules: Mapping[tuple[int, int], StageModule], devices: Sequence[torch.device] = ()
    ) -> None:
        self._devices = devices
        self._owner: dict[int, int] = {}
        self._memos: dict[int, dict[int, Any]] = {}
        self._divided: set[int] = set()
        self.lent: list[Lent] = []
        self.copied: list[tuple[nn.Module, nn.Module]] = []
        for (rank, _), stage in modules.items():
            for n, layer in enumerate(stage.layers):
                stage.layers[n] = self._separate(layer, rank)
        self._buffers = [
            (one, name, other)
            for pair in self.copied
            for one, other in zip(*(module.modules() for module in pair), strict=True)
            for name in one._buffers
        ]
        self.record()

    def _separate(self, module: nn.Module, rank: int) -> nn.Module:
        if self._owner.setdefault(id(module), rank) != rank:
            copied = alias(module, self._memos.setdefault(rank, {}))
            self.copied.append((module, copied))
            return copied.to(self._devices[rank]) if self._devices else copied
        if id(module) in self._divided:
            return module
        self._divided.add(id(module))
        if self._devices:
            # Another rank's stage may have taken what it has in common with this one to its own device.
            move_own(module, self._devices[rank])
        for child in list(module.children()):
            separate = self._separate(child, rank)
            if separate is not child:
                names = [name for name, member in module._modules.items() if member is child]
                self.lent += [Lent(module._modules, name, separate) for name in names]
        return module

    def record(self) -> None:
        """Record the user's buffers after a step; what its forwards wrote is not copied."""
        self._marks = [Mark(one._buffers[name]) for one, name, _ in self._buffers]

    def sync(self) -> None:
        """Give the copies the values that were written to the user's buffers since the last step, as a loaded state."""
        for (one, name, other), before in zip(self._buffers, self._marks, strict=True):
            value, copied = one._buffers[name], other._buffers[name]
            if before.holds(value):
                continue
            if value is None or copied is None or (value.shape, value.dtype) != (copied.shape, copied.dtype):
                place = None if copied is None else copied.device
                other._buffers[name] = None if value is None else value.to(place, copy=True)
            else:
                with torch.no_grad():
                    copied.copy_(value)
        self.record()


class Isolations:
    """Parameters and buffers that stages of different ranks have in common and must not use."""

    def __init__(self, layers_of_stages: Sequence[Sequence[Layer]], placement: Placement) -> None:
        built = [
            (layer.name, layer.module, stage)
            for stage, layers in enumerate(layers_of_stages)
            for layer in layers
            if layer.module is not None
        ]
        self._names: dict[int, Foreign] = {
            key: known for layer, module, _ in built for key, known in _foreign(layer, module)
        }
        # Stages on the same ranks share a module, if each is on one: copies of stages in threads have copies of their own.
        places: dict[int, set[tuple[int, ...]]] = {}
        uses: list[tuple[int, str, int]] = []
        for layer, module, stage in built:
            for name, buffer in module.named_buffers(remove_duplicate=False):
                held = placement.holders[stage]
                places.setdefault(id(buffer), set()).add(held if len(held) == 1 else (*held, stage))
                uses.append((id(buffer), f"{layer}.{name}", stage))
        self._buffers = {(stage, name) for buffer, name, stage in uses if len(places[buffer]) > 1}

    def of(self, stages: Mapping[tuple[int, int], StageModule]) -> dict[tuple[int, int], Isolation]:
        """Return the isolation of every (rank, stage) of this process."""
        names = dict(self._names)
        for module in stages.values():
            for name, layer in module.named_layers():
                names.update(_foreign(name, layer))
        isolations = {}
        for (rank, s), module in stages.items():
            registered = {id(p) for p in module.parameters()}
            buffers = [
                (f"{layer}.{name}", top.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
                for layer, top in module.named_layers()
                for name, _ in top.named_buffers(remove_duplicate=False)
                if (s, f"{layer}.{name}") in self._buffers
            ]
            foreign = {key: known for key, known in names.items() if key not in registered}
            isolations[rank, s] = Isolation(foreign, buffers)
        return isolations


def _foreign(layer: str, module: nn.Module) -> Iterator[tuple[int, Foreign]]:
    """Yield the ids of a layer's parameters, and where they are."""
    for name, parameter in module.named_parameters():
        path, _, attribute = name.rpartition(".")
        yield id(parameter), (module.get_submodule(path), attribute, whole_name(layer, name))
