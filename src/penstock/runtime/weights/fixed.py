"""Refuse changes of modules and parameters that cannot reach their copies.

Gradients of copies (replicas, stages on several ranks, tied weights) are joined parameter by parameter. A parameter added
or replaced after the pipeline was built would be trained on one copy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from operator import is_
from typing import Any

from torch import Tensor, nn

from penstock.base.errors import ConfigError, ReplicaError
from penstock.parallel.participant import Participant, Step
from penstock.parallel.replicas.buckets import GradientBuckets
from penstock.parallel.tensor.matrices import sums_gradients
from penstock.stage.layers import whole_name
from penstock.stage.module import StageModule


def whole_model_modules(stages: Iterable[StageModule]) -> Iterator[tuple[str, nn.Module]]:
    """Return (name in the whole model, module) pairs of all modules in some stages."""
    for stage in stages:
        for layer, module in stage.named_layers():
            for inner, submodule in module.named_modules():
                yield whole_name(layer, inner) if inner else layer, submodule


class FixedModules(Participant):
    """Modules and parameters of stages, as they were when the pipeline was built."""

    def __init__(self, stages: Iterable[StageModule], tied: Iterable[str] = ()) -> None:
        modules = list(whole_model_modules(stages))
        self._members: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
            (name, kind, members, dict(members))
            for name, module in modules
            for kind, members in (("parameters", module._parameters), ("modules", module._modules))
        ]
        names = set(tied)
        self._tied = [
            (name, p)
            for prefix, module in modules
            for inner, p in module._parameters.items()
            if p is not None and (name := f"{prefix}.{inner}") in names
        ]

    def begin(self, step: Step) -> None:
        self.check(step.trains)

    def check(self, trains: bool) -> None:
        """Check the modules before a step, and before a training step the hooks, too."""
        self._require_same()
        if trains:
            self._require_no_hooks()

    def _require_same(self) -> None:
        for name, kind, members, before in self._members:
            if len(members) != len(before) or not all(map(is_, members.values(), before.values())):
                changed = (key for key in {**before, **members} if members.get(key) is not before.get(key))
                member = next((f".{key}" for key in changed), "")
                raise ReplicaError(
                    f"{name}{member}: {kind} of {name} were added, removed or replaced after the pipeline was built, and "
                    "there are copies of them (dp, stages on several ranks, or tied weights), which would not follow; "
                    "change values in place (p.data = ..., load_state_dict without assign=True), or make a new Pipeline"
                )

    def _require_no_hooks(self) -> None:
        # A hook of a tied weight's gradient would see the gradient of each stage, not their sum.
        for name, p in self._tied:
            if p._backward_hooks and not all(map(sums_gradients, p._backward_hooks.values())):
                raise ReplicaError(
                    f"parameter {name} is tied over several stages and has a hook of its gradient, which would see the "
                    "gradient of each stage in place of their sum; keep its layers on one stage (split=...), or change "
                    "gradients after the step",
                    name,
                )
            require_no_late_hook(name, p)


def require_no_late_hook(name: str, parameter: Tensor) -> None:
    """Raise if a hook runs after the gradient was accumulated: it would see a part of it. Hooks of buckets are allowed."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    if not all(_is_internal(hook) for hook in hooks.values()):
        raise ConfigError(
            f"parameter {name} has a hook that runs after its gradient was accumulated, and a copy on another rank or "
            "replica, whose gradient is added later; use a hook of the gradient (register_hook), or an optimizer"
        )


def _is_internal(hook: object) -> bool:
    return isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), GradientBuckets)
