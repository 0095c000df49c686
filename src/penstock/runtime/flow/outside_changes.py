"""Changes that an optimizer's step makes where a copy of weights, their state and options does not see them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pickle import dumps
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.runtime.flow.group_options import is_copied
from penstock.stage.rng.default_generators import default_states

_OF_TORCH = ("_opt_called", "_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured")
"""Attributes that torch sets in the first step, and that change no number."""
_LEAVES = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_PLAIN = (int, float, complex, str, bytes, type(None))


class OutsideChanges:
    """A check that steps of an optimizer change no more than weights with gradients, their state, and options of groups.

    The first step is compared number by number, later ones by the versions of tensors.

    Args:
        optimizer: the rank's optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._first = True

    def check(self, step: Callable[[], object]) -> None:
        """Run a step.

        Raises:
            ConfigError: if the optimizer has step hooks, or the step draws random numbers or changes anything else.
        """
        name, optimizer = type(self._optimizer).__name__, self._optimizer
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise ConfigError(
                f"{name} has hooks on its step, which would run for updates that are undone, too; remove them, or use "
                "flow=False"
            )
        before, drawn = self._values(), _random_states()
        step()
        after = self._values()
        if drawn != _random_states():
            raise ConfigError(
                f"{name} draws random numbers in its step, and an update that is repeated would draw others; use flow=False"
            )
        changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        self._first = False
        if changed:
            raise ConfigError(
                f"{name} changes {min(changed, key=lambda key: (len(key), key))} in its step, which is neither in the state "
                "of a parameter with a gradient nor an option of its group, so that an update could not be undone; keep it "
                "in optimizer.state[parameter], or use flow=False"
            )

    def _values(self) -> dict[str, object]:
        """Return all that a step must not change, by a name for the user."""
        optimizer = self._optimizer
        trained: list[Tensor] = []
        idle: list[Tensor] = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                (idle if p.grad is None else trained).append(p)
        seen = {id(optimizer), id(optimizer.state), id(optimizer.param_groups)}
        seen.update(map(id, optimizer.param_groups), map(id, trained))
        seen.update(id(optimizer.state[p]) for p in trained if p in optimizer.state)
        kept: list[object] = []  # so that no id is used twice
        values: dict[str, object] = {}
        own = {f"its attribute {k!r}": v for k, v in vars(optimizer).items() if k not in _OF_TORCH}
        others = [key for key in optimizer.state if not isinstance(key, Tensor)]
        own |= {f"optimizer.state[{key!r}]": optimizer.state[key] for key in others}
        own |= {f"parameter {n} without a gradient": p for n, p in enumerate(idle)}
        own |= {
            f"the state of parameter {n} without a gradient": optimizer.state.get(p)
            for n, p in enumerate(idle)
        }
        own |= {
            f"within option {name!r} of group {n}": value
            for n, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if not is_copied(value)
        }
        for place, value in own.items():
            values.update(self._flat(place, value, seen, kept))
        return values

    def _flat(
        self, place: str, value: Any, seen: set[int], kept: list[object]
    ) -> Iterator[tuple[str, object]]:
        """Yield (place, comparable value) of all that is within a value."""
        if isinstance(value, _PLAIN):
            yield place, (type(value), value)
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        kept.append(value)
        if isinstance(value, Tensor):
            content = (id(value), value._version, tuple(value.shape), value.dtype)
            yield place, (content, _bytes(value) if self._first else None)
        elif isinstance(value, torch.Generator):
            yield place, value.get_state().numpy().tobytes()
        elif isinstance(value, random.Random):
            yield place, value.getstate()
        elif isinstance(value, _LEAVES):
            yield place, id(value)
        elif isinstance(value, Mapping):
            yield place, len(value)
            for key, each in value.items():
                yield from self._flat(
                    f"{place}[{key if isinstance(key, _PLAIN) else id(key)!r}]", each, seen, kept
                )
        elif isinstance(value, list | tuple | set | frozenset):
            yield place, len(value)
            for n, each in enumerate(value):
                yield from self._flat(f"{place}[{n}]", each, seen, kept)
        elif hasattr(value, "__dict__"):
            for key, each in vars(value).items():
                yield from self._flat(f"{place}.{key}", each, seen, kept)
        else:
            yield place, _pickled(value)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _pickled(value: object) -> object:
    try:
        return dumps(value)
    except Exception:  # it cannot be compared by its content
        return id(value)


def _random_states() -> tuple[object, ...]:
    numpy = sys.modules.get("numpy")
    drawn = () if numpy is None else (dumps(numpy.random.get_state()),)
    return (*default_states(), random.getstate(), *drawn)
