"""Modules that two ranks of one process would share: each rank gets its own, with the same parameters' memory.

A module may be used at several places of a model. Where these places are on two ranks, which are threads, both would
accumulate into one parameter's gradient, at the same time. So the first rank keeps the user's module, and every other
rank gets a copy whose parameters share the memory. The gradients become one sum as those of any tied weight do; see
`shared`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.runtime.copies.aliases import require_no_late_hook
from penstock.schedule.placement import Placement
from penstock.stage.isolation import Isolation
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule

M = TypeVar("M", bound=nn.Module)


def alias(module: StageModule, memo: dict[int, Any] | None = None) -> StageModule:
    """Copy a module; the copy shares its parameters' memory but has gradients and buffers of its own.

    Args:
        module: what is copied.
        memo: what was copied before, for modules that share parameters; filled in.
    """
    return _alias(module, {} if memo is None else memo)


def _alias(module: M, memo: dict[int, Any]) -> M:
    for name, p in module.named_parameters():
        if id(p) not in memo:
            require_no_late_hook(name, p)  # hooks of the gradient follow (see `Aliases`)
            memo[id(p)] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
    for part in module.modules():
        # Hooks before a forward (pruning, the older weight_norm) leave what they computed as an attribute, which deepcopy
        # refuses; the copy's own hooks compute it again.
        for value in vars(part).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach())
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            f"a {type(module).__name__} is to have copies, for several ranks or replicas that are threads, and cannot be "
            f"copied ({error}); keep its places on one rank (split=...), keep what cannot be copied out of it, or run one "
            "process a rank (torchrun)"
        ) from error


class Separated:
    """The copies that keep the ranks of one process apart.

    Args:
        modules: (rank, stage) → the module there; layers that an earlier rank has are replaced by copies.

    Attributes:
        copied: (module, copy).
    """

    def __init__(self, modules: Mapping[tuple[int, int], StageModule]) -> None:
        self._owner: dict[int, int] = {}
        self._memos: dict[int, dict[int, Any]] = {}
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        self.copied: list[tuple[nn.Module, nn.Module]] = []
        for (rank, _), stage in modules.items():
            for n, layer in enumerate(stage.layers):
                stage.layers[n] = self._own(layer, rank)

    def _own(self, module: nn.Module, rank: int) -> nn.Module:
        if self._owner.setdefault(id(module), rank) != rank:
            own = _alias(module, self._memos.setdefault(rank, {}))
            self.copied.append((module, own))
            return own
        for child in list(module.children()):
            own = self._own(child, rank)
            if own is not child:
                for place in [n for n, m in module._modules.items() if m is child]:
                    self._replaced.append((module, place, child))
                    setattr(module, place, own)
        return module

    def undo(self) -> None:
        """Give the user's modules their parts back."""
        for module, name, before in reversed(self._replaced):
            setattr(module, name, before)
        self._replaced.clear()


class Isolations:
    """What the stages of different ranks have in common and must not use, for every stage of a process.

    Args:
        runs: the layers of each stage.
        placement: which rank holds which stage.
    """

    def __init__(self, runs: Sequence[Sequence[Layer]], placement: Placement) -> None:
        self._given = {
            id(p): f"{layer.name}.{name}"
            for run in runs
            for layer in run
            if layer.module is not None
            for name, p in layer.module.named_parameters()
        }
        places: dict[int, set[tuple[int, ...]]] = {}
        names: list[tuple[int, str, int]] = []
        for stage, run in enumerate(runs):
            for layer in run:
                if layer.module is None:
                    continue
                for name, buffer in layer.module.named_buffers(remove_duplicate=False):
                    places.setdefault(id(buffer), set()).add(placement.holders[stage])
                    names.append((id(buffer), f"{layer.name}.{name}", stage))
        shared = [(name, stage) for key, name, stage in names if len(places[key]) > 1]
        self._buffers = {s: {name for name, stage in shared if stage == s} for _, s in shared}

    def of(self, stages: Mapping[tuple[int, int], StageModule]) -> dict[tuple[int, int], Isolation]:
        """The isolation of every (rank, stage) of this process."""
        known = dict(self._given)
        for stage in stages.values():
            known.update((id(p), name) for name, p in stage.whole_model_parameters())
        found = {}
        for place, module in stages.items():
            own = {id(p) for p in module.parameters()}
            wanted = self._buffers.get(place[1], set())
            buffers = [
                (f"{layer}.{name}", part.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
                for layer, part in module.named_layers()
                for name, _ in part.named_buffers(remove_duplicate=False)
                if f"{layer}.{name}" in wanted
            ]
            found[place] = Isolation({key: name for key, name in known.items() if key not in own}, buffers)
        return found
