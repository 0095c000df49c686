"""Copies of modules in other threads, kept like the user's modules between two steps.

Attributes with plain values are copied (``training``, the ``p`` of a dropout, an activation function), and so are
containers and objects of such values (a config). Other changes, such as new layers or hooks, would reach one copy only,
and are refused by name.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from penstock.errors import ReplicaError
from penstock.runtime.copies.fixed import whole_model_modules
from penstock.stage.live import INTERNAL
from penstock.stage.module import StageModule

_VALUES = bool, int, float, complex, str, bytes, types.NoneType, torch.dtype
_PLAIN = frozenset([*_VALUES, types.FunctionType, types.BuiltinFunctionType])
"""Types of values that copies may share."""

_DEEPEST = 6
"""Nesting to which containers and objects are followed."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleCopies:
    """Modules that have copies in this process.

    Args:
        pairs: (module, its copies): the module that the user changes, and those that get its changes.
    """

    def __init__(
        self, stages: Iterable[StageModule], pairs: Iterable[tuple[nn.Module, Sequence[nn.Module]]]
    ) -> None:
        names: dict[int, str] = {}
        for name, module in whole_model_modules(stages):
            names.setdefault(id(module), name)
        self._modules = [
            _CopiedModule(names.get(id(first), type(first).__name__), first, others)
            for module, copies in pairs
            for first, *others in zip(module.modules(), *(c.modules() for c in copies), strict=True)
            if copies and not isinstance(first, StageModule)
        ]

    def sync(self) -> None:
        """Copy changed attributes, before a step.

        Raises:
            ReplicaError: if the copies cannot get a change; names the module. No attribute was copied then.
        """
        for module in self._modules:
            module.require_same_structure()
        known: dict[int, Any] = {}
        for module in self._modules:
            module.sync(known)

    def record(self) -> None:
        """Record the modules after a step; attributes that its forwards changed are not copied."""
        known: dict[int, Any] = {}
        for module in self._modules:
            module.record(known)


class _CopiedModule:
    def __init__(self, name: str, module: nn.Module, copies: Sequence[nn.Module]) -> None:
        self.name = name
        self.module = module
        self.copies = [other for other in copies if other is not module]
        self.record({})

    def record(self, known: dict[int, Any]) -> None:
        values = vars(self.module)
        self._structure, self._attributes = _structure(self.module), _plain(values, known)
        # Keep the objects alive: the id of a dead one may be reused.
        self._alive = [*values["_parameters"].values(), *values["_modules"].values(), values.get("forward")]

    def require_same_structure(self) -> None:
        structure = _structure(self.module)
        if structure == self._structure:
            return
        change = next(key for key, value in structure.items() if value != self._structure[key])
        raise ReplicaError(
            f"module {self.name!r} ({type(self.module).__name__}) has {change} than when the pipeline was built, which its "
            "copies in other threads (stages that several ranks hold, a module used on several ranks) cannot follow; "
            "undo the change, build a new Pipeline, or use one without copies",
            self.name,
        )

    def sync(self, known: dict[int, Any]) -> None:
        attributes = _plain(vars(self.module), known)
        if attributes == self._attributes:
            return
        for key, value in attributes.items():
            if key not in self._attributes or self._attributes[key] != value:
                for other in self.copies:
                    vars(other)[key] = copy.deepcopy(vars(self.module)[key])
        self._attributes = attributes


def _plain(values: Mapping[str, Any], known: dict[int, Any]) -> dict[str, Any]:
    """Return the attributes whose values can be given to copies, in a form that a change in place does not change.

    Args:
        known: forms of objects by id, since modules may share a config; filled in.
    """
    plain = {}
    for key, value in values.items():
        if type(value) in _PLAIN:
            if key != "forward":
                plain[key] = value
        elif key not in INTERNAL:
            if id(value) not in known:
                known[id(value)] = _frozen(value, 0)
            if (form := known[id(value)]) is not None:
                plain[key] = form
    return plain


def _frozen(value: Any, depth: int) -> Any:
    """Return a container or object of plain values as nested tuples; None if there is anything else in it."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, Enum):
        return kind, value
    if depth > _DEEPEST:
        return None
    if isinstance(value, list | tuple):
        parts = [_frozen(part, depth + 1) for part in value]
    elif isinstance(value, dict):
        parts = [_frozen(part, depth + 1) for item in value.items() for part in item]
    elif hasattr(value, "__dict__") and not isinstance(
        value, nn.Module | torch.Tensor | type | types.ModuleType
    ):
        parts = [_frozen(part, depth + 1) for item in vars(value).items() for part in item]
    else:
        return None
    return None if None in parts else (kind, *parts)


def _structure(module: nn.Module) -> dict[str, object]:
    """Return the properties that cannot be given to copies; the keys are the words for a change in an error."""
    values = vars(module)
    return {
        "another class": type(module),
        "another forward": id(values.get("forward")),
        "other parameters": [(name, id(p)) for name, p in values["_parameters"].items()],
        "other modules": [(name, id(child)) for name, child in values["_modules"].items()],
        "other buffers": list(values["_buffers"]),
        "other hooks": [list(values[hooks]) for hooks in _HOOKS],
    }
