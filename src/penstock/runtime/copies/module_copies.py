"""Modules with copies in other threads: what the user changes on a module between two steps holds for its copies.

Attributes with plain values follow (``training``, the ``p`` of a dropout, an activation function). Other changes, such as
new layers or hooks, cannot: they would reach one copy and leave the others as they were. They are refused by name.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import ReplicaError
from penstock.stage.module import StageModule

_VALUES = bool, int, float, complex, str, bytes, types.NoneType, torch.dtype
_PLAIN = frozenset([*_VALUES, types.FunctionType, types.BuiltinFunctionType])
"""The types of values that copies may share."""

_PARTS = (
    "another class",
    "another forward",
    *["other parameters"] * 2,
    *["other modules"] * 2,
    "other buffers",
    *["other hooks"] * 4,
)


class ModuleCopies:
    """The modules of which there are copies in this process.

    Args:
        stages: the modules of this process's stages, which say what modules are called.
        pairs: (module, its copies), from what the user sees to what follows it.
    """

    def __init__(
        self, stages: Iterable[StageModule], pairs: Iterable[tuple[nn.Module, Sequence[nn.Module]]]
    ) -> None:
        names: dict[int, str] = {}
        for stage in stages:
            for layer, top in stage.named_layers():
                for name, part in top.named_modules(prefix=layer):
                    names.setdefault(id(part), name)
        self._modules = [
            _Followed(names.get(id(one), type(one).__name__), one, others)
            for module, copies in pairs
            for one, *others in zip(module.modules(), *(c.modules() for c in copies), strict=True)
            if copies and not isinstance(one, StageModule)
        ]

    def follow(self) -> None:
        """Before a step.

        Raises:
            ReplicaError: copies cannot follow what was changed; names the module. No attribute was changed.
        """
        for module in self._modules:
            module.require_same_form()
        for module in self._modules:
            module.follow()

    def ran(self) -> None:
        """After a step: what forwards have changed is each copy's own."""
        for module in self._modules:
            module.look()


class _Followed:
    """A module and its copies."""

    def __init__(self, name: str, module: nn.Module, copies: Sequence[nn.Module]) -> None:
        self.name = name
        self.module = module
        self.copies = [copy for copy in copies if copy is not module]
        self.look()

    def look(self) -> None:
        values = vars(self.module)
        self._form, self._plain = _form(self.module, values), _plain(values)
        # An id is another object's once its own has gone.
        self._held = [*values["_parameters"].values(), *values["_modules"].values(), values.get("forward")]

    def require_same_form(self) -> None:
        form = _form(self.module, vars(self.module))
        if form == self._form:
            return
        what = next(w for w, now, before in zip(_PARTS, form, self._form, strict=True) if now != before)
        raise ReplicaError(
            f"module {self.name!r} ({type(self.module).__name__}) has {what} than when the pipeline was built, which its "
            "copies in other threads (dp, stages that several ranks hold, a module used on several ranks) cannot follow; "
            "undo the change, build a new Pipeline, or use one without copies",
            self.name,
        )

    def follow(self) -> None:
        now = _plain(vars(self.module))
        if now == self._plain:
            return
        for key, value in now.items():
            if key not in self._plain or self._plain[key] != value:
                for copy in self.copies:
                    vars(copy)[key] = value
        self._plain = now


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if type(value) in _PLAIN and key != "forward"}


def _form(module: nn.Module, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """What copies cannot follow, in the order of `_PARTS`."""
    parameters, modules = values["_parameters"], values["_modules"]
    return (
        type(module),
        id(values.get("forward")),
        tuple(parameters),
        tuple(map(id, parameters.values())),
        tuple(modules),
        tuple(map(id, modules.values())),
        tuple(values["_buffers"]),
        tuple(values["_forward_hooks"]),
        tuple(values["_forward_pre_hooks"]),
        tuple(values["_backward_hooks"]),
        tuple(values["_backward_pre_hooks"]),
    )
