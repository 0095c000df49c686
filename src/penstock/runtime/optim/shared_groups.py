"""The parameter groups of a PipelineOptimizer, which programs read and change as those of any torch optimizer.

Each rank has a torch optimizer with its own parameters, and with options that it may also write itself. The shared groups
have the parameters of all ranks of this process. What a program writes into them, such as a learning rate, goes to every
rank's optimizer; all else is read back from the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import ConfigError
from penstock.runtime.optim.factory import SeveralOptimizers
from penstock.runtime.optim.groups import Named
from penstock.runtime.optim.state import numbers
from penstock.runtime.start.agreement import require_same
from penstock.runtime.workers.world import World

_OF_A_RANK = ("params", "param_names")


def shared_groups(
    groups: Mapping[int, list[Named]], parameters: Iterable[nn.Parameter]
) -> list[dict[str, Any]]:
    """Return groups with the parameters of all ranks, in the order of the model's parameters."""
    order = {p: place for place, p in enumerate(parameters)}
    count = len(next(iter(groups.values())))
    members = [dict.fromkeys(p for of_rank in groups.values() for _, p in of_rank[n]) for n in range(count)]
    return [{"params": sorted(group, key=lambda p: order.get(p, len(order)))} for group in members]


class SharedOptions:
    """Options of parameter groups that are the same for the optimizers of all ranks.

    Args:
        shared: optimizer whose groups programs change.
        optimizers: the optimizers of this process's ranks, with as many groups.
    """

    def __init__(self, shared: torch.optim.Optimizer, optimizers: list[torch.optim.Optimizer]) -> None:
        self._shared, self._optimizers = shared, optimizers
        self._members = _members(shared)
        first = optimizers[0]
        groups = first.param_groups
        # Schedulers that cycle the momentum write the same option into all groups, whatever a group's optimizer calls it.
        with_betas = {n for n, group in enumerate(groups) if "momentum" not in group and "betas" in group}
        cycles = all("momentum" in group or "betas" in group for group in groups)
        self._renamed = with_betas if cycles and len(with_betas) < len(groups) else set()
        for _, made in first.parts if isinstance(first, SeveralOptimizers) else (((), first),):
            shared.defaults.update(made.defaults)
        for name in ("momentum", "betas"):
            if not cycles or (self._renamed and name == "betas"):
                shared.defaults.pop(name, None)
        self._known: list[dict[str, Any]] = [{} for _ in groups]
        self._changed: dict[str, Any] = {}
        self.take()

    def give(self) -> None:
        """Write what was changed in the shared groups since the last call into those of all ranks.

        Raises:
            ConfigError: if there are other groups or other parameters in them.
        """
        if _members(self._shared) != self._members:
            raise ConfigError(
                "the groups of a PipelineOptimizer have other parameters than at first, which its ranks do not update; "
                "change options alone, and make a new PipelineOptimizer(..., groups=[...]) for other groups"
            )
        for n, group in enumerate(self._shared.param_groups):
            for key, value in _options(group).items():
                if key not in self._known[n] or self._known[n][key] != numbers(value):
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
        """Read the options of the first rank back into the shared groups."""
        for n, (group, own) in enumerate(
            zip(self._shared.param_groups, self._optimizers[0].param_groups, strict=True)
        ):
            group.update(_options(own))
            if n in self._renamed:
                group["momentum"] = group["betas"][0]
            self._known[n] = {key: numbers(value) for key, value in _options(group).items()}

    def require_same(self, world: World | None) -> None:
        """Check that all processes of the run made the same changes since the last update; every process calls it.

        Raises:
            ConfigError: on every process; names an option with both values.
        """
        self.give()
        changed, self._changed = self._changed, {}
        if world is not None:
            require_same(
                {name: repr(_rounded(value)) for name, value in changed.items()},
                world.collectives,
                what="the options of a PipelineOptimizer were changed on some processes only, or not alike",
                missing="as it was",
                advice="Change them alike on every process, by a number that is the same on all, such as result.loss. No "
                "weight was changed",
            )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OF_A_RANK}


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def _rounded(value: Any) -> Any:
    """Return options without their last digits, which may differ on processors of other kinds."""
    if isinstance(value, tuple | list):
        return [_rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value
