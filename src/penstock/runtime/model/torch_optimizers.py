"""Torch optimizers that a program makes over ``pipe.parameters()``: each is judged at its first step.

A process has some of the model's parameters, or parts of them. An optimizer that reads more than that would compute other
numbers.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.base.errors import ConfigError
from penstock.parallel.dtensor import is_dtensor
from penstock.runtime.engine import Engine
from penstock.runtime.model.optimizer_trials import differs_in_parts, looks_across, needs_whole
from penstock.runtime.weights.parameters import LocalParameters

CHECKED = weakref.WeakSet[torch.optim.Optimizer]()
"""Each `PipelineOptimizer` and those that it made, which it has judged."""


def watch_torch_optimizers(engine: Engine, parameters: LocalParameters, ranks: int) -> None:
    """Judge every torch optimizer of parameters of a pipeline in processes, until it is closed.

    Args:
        ranks: number of pipeline ranks.
    """
    seen, running = weakref.WeakSet[torch.optim.Optimizer](), weakref.ref(engine)

    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        # The import that this needs takes seconds, and is done where a step is compiled, which would compile the trials.
        (torch.compiler.disable(judge) if torch.compiler.is_compiling() else judge)(optimizer)

    def judge(optimizer: torch.optim.Optimizer) -> None:
        of = running()
        if of is None or of.closed or optimizer in CHECKED or optimizer in seen:
            return
        own = {id(p) for _, p in parameters.named_parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            for group in optimizer.param_groups:
                _judge(optimizer, group, ranks)
            seen.add(optimizer)

    handle = register_optimizer_step_pre_hook(hook)
    weakref.finalize(engine, handle.remove).atexit = False


def _judge(optimizer: torch.optim.Optimizer, group: dict[str, Any], ranks: int) -> None:
    kind, parameters = type(optimizer), group["params"]
    if not parameters:
        return
    device = parameters[0].device
    options = {key: group[key] for key in _arguments(kind, optimizer.defaults) if key in group}
    across = looks_across(kind, options, device)
    if across and ranks > 1:
        instead = "use ranks=1, or a PipelineOptimizer if one rank has all that it updates"
        raise ConfigError(looking_across(kind, f"each of the {ranks} ranks has only its own", instead))
    if not any(map(is_dtensor, parameters)) or not (across or needs_whole(kind, options, device)):
        return
    if differs_in_parts(kind, options, parameters, across):
        raise ConfigError(
            f"{kind.__name__} looks at more than each element by itself, and gives other numbers where processes have parts "
            f"of a tensor; use penstock.PipelineOptimizer(pipe, {kind.__name__}, ...), which gives it whole tensors, or an "
            "optimizer that updates each element by itself, such as AdamW"
        )


def _arguments(kind: type, defaults: dict[str, Any]) -> list[str]:
    """Return the names of the options that an optimizer is made with, but for its parameters."""
    taken = inspect.signature(kind).parameters.values()
    given = defaults if any(p.kind is p.VAR_KEYWORD for p in taken) else (p.name for p in taken)
    return [name for name in given if name != "params"]


def looking_across(make: Callable[..., object], divided: str, instead: str) -> str:
    """Return what is said of an optimizer that looks at parameters which its process does not have."""
    name = getattr(make, "__name__", "the optimizer")
    return (
        f"{name}'s update of a parameter depends on the others, too, and {divided}; use an optimizer that updates each "
        f"parameter by itself, such as AdamW, or {instead}"
    )
