"""What must not change while there are copies of a model's parts: which modules and parameters it is made of.

Gradients of copies (replicas, stages on several ranks, tied weights) are joined parameter by parameter. One that was put
in or replaced after the pipeline was built would be trained on one copy only. So it is refused by name, before a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

from penstock.errors import ReplicaError
from penstock.parallel.tensor.plan import sums_gradients
from penstock.runtime.copies.aliases import require_no_late_hook
from penstock.stage.module import StageModule


class FixedModules:
    """The modules and parameters of stages, as they were when the pipeline was built.

    Args:
        modules: of the stages.
        tied: names of weights that several stages have.
    """

    def __init__(self, modules: Iterable[StageModule], tied: Iterable[str] = ()) -> None:
        modules = list(modules)
        self._parts: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []
        for stage in modules:
            for layer, top in stage.named_layers():
                for name, part in top.named_modules(prefix=layer):
                    for what, held in (("parameters", part._parameters), ("modules", part._modules)):
                        self._parts.append((name, what, held, dict(held)))
        names = set(tied)
        self._tied = [
            (name, p)
            for stage in modules
            for layer, top in stage.named_layers()
            for inner, p in top.named_parameters(remove_duplicate=False)
            if (name := f"{layer}.{inner}") in names
        ]

    def check(self, trains: bool) -> None:
        """Before a step.

        Args:
            trains: whether it is a training step.

        Raises:
            ReplicaError: copies could not follow what was changed.
        """
        self._require_same()
        if trains:
            self._require_no_hooks()

    def _require_same(self) -> None:
        """Refuse a step of a model that is made of other parts.

        Raises:
            ReplicaError: a module has other parameters or modules; names it.
        """
        for name, what, held, before in self._parts:
            if len(held) != len(before) or not all(map(is_, held.values(), before.values())):
                changed = (key for key in {**before, **held} if held.get(key) is not before.get(key))
                other = next((f".{key}" for key in changed), "")
                raise ReplicaError(
                    f"{name}{other}: the {what} of {name} are others than when the pipeline was built, and "
                    "there are copies of them (dp, stages on several ranks, or tied weights), which would not follow; "
                    "change values in place (p.data = ..., load_state_dict without assign=True), or make a new Pipeline"
                )

    def _require_no_hooks(self) -> None:
        """Refuse hooks of a tied weight's gradient, which would see the gradient of each stage, not their sum.

        Raises:
            ReplicaError: there is one; names the weight.
        """
        for name, p in self._tied:
            if p._backward_hooks and not all(map(sums_gradients, p._backward_hooks.values())):
                raise ReplicaError(
                    f"parameter {name} is tied over several stages and has a hook of its gradient, which would see the "
                    "gradient of each stage in place of their sum; keep its layers on one stage (split=...), or change "
                    "gradients after the step",
                    name,
                )
            require_no_late_hook(name, p)
