"""Copies of modules in other threads, kept like the user's modules between two steps.

Attributes with plain values are copied (``training``, the ``p`` of a dropout, an activation function). Other changes, such
as new layers or hooks, would reach one copy only; they are refused by name.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import ReplicaError
from penstock.runtime.copies.fixed import whole_model_modules
from penstock.stage.module import StageModule

_VALUES = bool, int, float, complex, str, bytes, types.NoneType, torch.dtype
_PLAIN = frozenset([*_VALUES, types.FunctionType, types.BuiltinFunctionType])
"""Types of values that copies may share."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleCopies:
    """Modules that have copies in this process.

    Args:
        stages: modules of this process's stages, which give modules their names.
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
        for module in self._modules:
            module.sync()

    def record(self) -> None:
        """Record the modules after a step; attributes that its forwards changed are not copied."""
        for module in self._modules:
            module.record()


class _CopiedModule:
    def __init__(self, name: str, module: nn.Module, copies: Sequence[nn.Module]) -> None:
        self.name = name
        self.module = module
        self.copies = [copy for copy in copies if copy is not module]
        self.record()

    def record(self) -> None:
        values = vars(self.module)
        self._structure, self._attributes = _structure(self.module), _plain(values)
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

    def sync(self) -> None:
        attributes = _plain(vars(self.module))
        if attributes == self._attributes:
            return
        for key, value in attributes.items():
            if key not in self._attributes or self._attributes[key] != value:
                for copy in self.copies:
                    vars(copy)[key] = value
        self._attributes = attributes


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if type(value) in _PLAIN and key != "forward"}


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
