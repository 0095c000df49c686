"""Optimizers of single groups of parameters beside the one that Trainer makes, such as Muon for the matrices of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.base.errors import ConfigError
from penstock.runtime.optim.factory import SeveralOptimizers, build_one
from penstock.runtime.optim.groups import Group, read_groups


def read_own_optimizers(given: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Return the groups of ``pipeline["optimizer"]``, and require that each has an ``optimizer``."""
    groups = list(read_groups(given))
    for group in groups:
        if "optimizer" not in group.options:
            raise ConfigError(
                f"pipeline['optimizer']: {group.label} has no 'optimizer', a class of torch.optim; options of single groups "
                "of the Trainer's own optimizer are given by create_optimizer of a subclass"
            )
    return groups


def with_own_optimizers(
    optimizer: torch.optim.Optimizer, model: nn.Module, groups: Sequence[Group]
) -> torch.optim.Optimizer:
    """Return an optimizer that leaves the parameters of the groups to optimizers of their own.

    Args:
        optimizer: optimizer of all parameters of this process; the groups' parameters are taken out of it.
        model: the whole model; parameters of other processes are on the meta device.
    """
    left = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parts: list[tuple[Sequence[int], torch.optim.Optimizer]] = [
        (range(len(optimizer.param_groups)), optimizer)
    ]
    names = {name for name, _ in model.named_parameters()}
    for n, group in enumerate(groups):
        taken = [left.pop(name) for name, p in [*left.items()] if group.match(name, p)]
        if unknown := [name for name in group.names if name not in names]:
            raise ConfigError(
                f"pipeline['optimizer']: {group.label} names {unknown[0]!r}, which the model does not have"
            )
        if not taken:
            raise ConfigError(f"pipeline['optimizer']: {group.label} takes no parameter that is trained")
        kind = group.options["optimizer"]
        options = {n: {key: value for key, value in group.options.items() if key != "optimizer"}}
        build_one(kind, {n: taken}, options, {})  # of all processes, so that each refuses alike
        made = build_one(kind, {n: [p for p in taken if not p.is_meta]}, options, {})
        ids = {id(p) for p in taken}
        for own in optimizer.param_groups:
            own["params"] = [p for p in own["params"] if id(p) not in ids]
        parts.append(([sum(len(numbers) for numbers, _ in parts)], made))
    return SeveralOptimizers(parts)
