"""Parameters of one process that are one parameter to the user: copies of a stage, and tied weights, in threads.

Autograd sees separate parameters; they share memory. A change to one applies to all: ``requires_grad``, new memory
(``p.data = ...``, ``model.double()``), and hooks on the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, ReplicaError
from penstock.parallel.data.buckets import GradientBuckets
from penstock.parallel.dtensor import gradient_dtype
from penstock.stage.values import same_values

_Memory = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


class _Group:
    """Parameters that are one parameter to the user; the first is the user's own.

    Attributes:
        hooked: whether hooks on the first are copied to the others. Not for tied weights: each of their uses has its own
            gradient, and a hook must see the sum (see `FixedModules`).
    """

    def __init__(self, name: str, members: tuple[nn.Parameter, ...], hooked: bool) -> None:
        self.name = name
        self.members = members
        self.hooked = hooked
        self._handles: list[Any] = []
        # State of all members after the last `sync`.
        self._requires_grad = members[0].requires_grad
        self._memory = _memory(members[0])
        self._hooks: tuple[Callable[[Tensor], Tensor | None], ...] = ()

    def sync(self) -> None:
        """Apply a change of one member to all."""
        pointer, dtype, shape, strides = self._memory
        first, moved = self.members[0], False
        for p in self.members:
            if p.requires_grad != self._requires_grad:
                self._requires_grad = p.requires_grad
                for member in self.members:
                    member.requires_grad_(self._requires_grad)
            if p.data_ptr() != pointer or p.dtype != dtype or p.shape != shape or p.stride() != strides:
                moved = True
        hooks = tuple((first._backward_hooks or {}).values())
        if self._requires_grad and self.hooked and hooks != self._hooks:
            self._copy_hooks(hooks)
        if getattr(first, "_post_accumulate_grad_hooks", None):
            require_no_late_hook(self.name, first)
        if moved:
            self._move()

    def _copy_hooks(self, hooks: tuple[Callable[[Tensor], Tensor | None], ...]) -> None:
        for handle in self._handles:
            handle.remove()
        self._hooks = hooks
        self._handles = [
            p.register_hook(hook)  # type: ignore[no-untyped-call]  # not annotated in torch
            for p in self.members[1:]
            for hook in hooks
        ]

    def _move(self) -> None:
        before = self._memory
        moved = [p for p in self.members if _memory(p) != before]
        source = moved[0]
        if any(not _same(p, source) for p in moved):
            raise ReplicaError(
                f"parameter {self.name!r} has several copies in this process, and they were given different values; set "
                "the data of one of them, and the others follow",
                self.name,
            )
        for p in self.members:
            if p is not source:
                _share(p, source)
        self._memory = _memory(source)


class Aliases:
    """Groups of a process's parameters that are one parameter to the user.

    Args:
        parameters: (name in the whole model, parameter) of all modules of the process, the user's own first; a tied
            weight has the first of its names.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], tied: Iterable[str] = ()) -> None:
        by_name: dict[str, dict[int, nn.Parameter]] = {}
        for name, p in parameters:
            by_name.setdefault(name, {})[id(p)] = p
        unhooked = set(tied)
        several = {name: tuple(group.values()) for name, group in by_name.items() if len(group) > 1}
        self._groups = [
            _Group(name, members, name not in unhooked)
            for name, members in several.items()
            if not members[0].is_meta
        ]

    def sync(self) -> None:
        """Apply changes made since the last step to all parameters of a group.

        Raises:
            ReplicaError: if parameters of one group were given different values.
            ConfigError: if one has a hook that runs after its gradient was accumulated.
        """
        for group in self._groups:
            group.sync()


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


def _memory(parameter: Tensor) -> _Memory:
    return parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.device == other.device and same_values(one.detach(), other.detach(), True))


def _share(parameter: nn.Parameter, source: nn.Parameter) -> None:
    """Give a parameter another one's memory; convert its gradient, or drop it if the shape differs."""
    grad, parameter.grad = parameter.grad, None
    parameter.data = source.data
    if grad is not None and grad.shape == parameter.shape:
        parameter.grad = grad.to(parameter.device, gradient_dtype(parameter))
