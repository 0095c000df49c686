"""The parameter groups of a PipelineOptimizer, which programs read and change as those of any torch optimizer.

What a program writes into them, such as a learning rate, goes to the torch optimizers of all ranks of this process, which
have groups with their own parameters and may write options, too; all else is read back from the first one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.runtime.workers.agreement import require_same
from penstock.runtime.workers.world import World

_UNKNOWN = object()


class SharedOptions:
    """Options of the groups of `shared`, which programs change, and of the optimizers of this process's ranks."""

    def __init__(self, shared: torch.optim.Optimizer, optimizers: list[torch.optim.Optimizer]) -> None:
        self._shared, self._optimizers = shared, optimizers
        self._members = _members(shared)
        groups = optimizers[0].param_groups
        # Schedulers that cycle the momentum write one option into all groups, whatever a group's optimizer calls it.
        cycles = any("momentum" in group for group in groups)
        self._renamed = {n for n, g in enumerate(groups) if cycles and "betas" in g and "momentum" not in g}
        self._known: list[dict[str, Any]] = [{} for _ in groups]
        self._changed: dict[str, Any] = {}
        self.take()
        shared.defaults.update(optimizers[0].defaults)
        for name in ("momentum", "betas"):
            if all(name in group for group in shared.param_groups):
                shared.defaults[name] = shared.param_groups[0][name]

    def give(self) -> None:
        """Write what was changed in the shared groups into those of all ranks; raise ConfigError if they are others."""
        if _members(self._shared) != self._members:
            raise ConfigError(
                "the groups of a PipelineOptimizer have other parameters than at first, which its ranks do not update; "
                "change options alone, and make a new PipelineOptimizer(..., groups=[...]) for other groups"
            )
        for n, group in enumerate(self._shared.param_groups):
            for key, value in options_of(group).items():
                if self._known[n].get(key, _UNKNOWN) != numbers(value):
                    self._write(n, key, value)
        self.take()

    def _write(self, n: int, key: str, value: Any) -> None:
        self._changed[f"param_groups[{n}][{key!r}]"] = numbers(value)
        for made in self._optimizers:
            group = made.param_groups[n]
            if key == "momentum" and n in self._renamed:
                group["betas"] = (value, *group["betas"][1:])
            elif isinstance(group.get(key), Tensor):
                group[key].fill_(numbers(value))  # a compiled step reads this tensor
            else:
                group[key] = value

    def take(self) -> None:
        """Read the options of the first rank back into the shared groups, and show the state of all ranks."""
        states = {p: entries for made in self._optimizers for p, entries in made.state.items()}
        self._shared.state = defaultdict(dict, states)
        for n, own in enumerate(self._optimizers[0].param_groups):
            group = self._shared.param_groups[n]
            group.update(options_of(own))
            if n in self._renamed:
                group["momentum"] = group["betas"][0]
            self._known[n] = numbers(options_of(group))

    def require_same(self, world: World | None, note: bool = False) -> bool:
        """Raise ConfigError unless all processes made the same changes since the last update; every process calls it.

        Returns:
            Whether any process gave a `note`.
        """
        self.give()
        changed, self._changed = self._changed, {}
        if world is None:
            return note
        notes = require_same(
            {name: repr(_rounded(value)) for name, value in changed.items()},
            world.collectives,
            what="the options of a PipelineOptimizer were changed on some processes only, or not alike",
            missing="as it was",
            advice="Change them alike on every process, by a number that is the same on all, such as result.loss. No "
            "weight was changed",
            note=note,
        )
        return any(notes)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a group that are not of its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def numbers(value: Any) -> Any:
    """Return options with numbers in place of 0-d tensors, such as a learning rate for compiled optimizers."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(numbers(item) for item in value)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def _rounded(value: Any) -> Any:
    """Return options without their last digits, which may differ on processors of other kinds."""
    if isinstance(value, tuple | list):
        return [_rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value
