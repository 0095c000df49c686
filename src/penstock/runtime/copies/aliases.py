"""Parameters of one process that are one for the user: copies of a stage, replicas, tied weights of threads.

For autograd each is a parameter of its own; all share one memory. What the user says of one holds for all: whether it
requires a gradient, which memory it has (``p.data = ...``, ``model.double()``), and the hooks of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, ReplicaError
from penstock.parallel.data.buckets import GradientBuckets
from penstock.parallel.dtensor import gradient_dtype

_Memory = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


class _Seen(NamedTuple):
    """A group as all of its parameters were when it was last looked at."""

    requires_grad: bool
    memory: _Memory
    hooks: tuple[Callable[[Tensor], Tensor | None], ...]


class _Group:
    """Parameters that are one for the user; the first is the user's own.

    Attributes:
        name: in the whole model.
        members: the parameters.
        hooked: whether the hooks of the first are copied to the others. Those of tied weights are not: their places have a
            gradient each, and a hook must see the sum (see `FixedModules`).
    """

    def __init__(self, name: str, members: tuple[nn.Parameter, ...], hooked: bool) -> None:
        self.name = name
        self.members = members
        self.hooked = hooked
        self._handles: list[Any] = []
        self._seen = _Seen(members[0].requires_grad, _memory(members[0]), ())

    def follow(self) -> bool:
        """Let all be as the one that was changed; returns whether dtype, shape or strides are others.

        Raises:
            ReplicaError: several were given other values than each other.
            ConfigError: one has a hook that runs after its gradient was accumulated.
        """
        flag, (at, dtype, shape, strides), hooks = self._seen
        first, moved = self.members[0], False
        for p in self.members:
            if p.requires_grad != flag:
                self._require_grad(not flag)
                flag = not flag
            if p.data_ptr() != at or p.dtype != dtype or p.shape != shape or p.stride() != strides:
                moved = True
        found = first._backward_hooks
        if flag and self.hooked and (found or hooks) and tuple((found or {}).values()) != hooks:
            self._hook()
        if getattr(first, "_post_accumulate_grad_hooks", None):
            require_no_late_hook(self.name, first)
        return self._move() if moved else False

    def _require_grad(self, flag: bool) -> None:
        for p in self.members:
            p.requires_grad_(flag)
        self._seen = self._seen._replace(requires_grad=flag)

    def _hook(self) -> None:
        for handle in self._handles:
            handle.remove()
        hooks = tuple((self.members[0]._backward_hooks or {}).values())
        self._handles = [
            p.register_hook(hook)  # type: ignore[no-untyped-call]  # not annotated in torch
            for p in self.members[1:]
            for hook in hooks
        ]
        self._seen = self._seen._replace(hooks=hooks)

    def _move(self) -> bool:
        before = self._seen.memory
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
        self._seen = self._seen._replace(memory=_memory(source))
        return self._seen.memory[1:] != before[1:]


class Aliases:
    """The parameters of a process, in groups of those that are one for the user.

    Args:
        parameters: (name in the whole model, parameter) of all modules of the process, the user's own first; a tied
            weight has the first of its names.
        tied: names of weights that several stages have.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], tied: Iterable[str] = ()) -> None:
        found: dict[str, dict[int, nn.Parameter]] = {}
        for name, p in parameters:
            found.setdefault(name, {})[id(p)] = p
        several = {name: tuple(group.values()) for name, group in found.items() if len(group) > 1}
        unhooked = set(tied)
        self._groups = [
            _Group(name, members, name not in unhooked)
            for name, members in several.items()
            if not members[0].is_meta
        ]

    def follow(self) -> bool:
        """Before a step: let what was changed since the last one hold for all parameters of a group.

        Returns:
            Whether some have another dtype, shape or strides now, so that buckets of gradients must be made again.

        Raises:
            ReplicaError: parameters of one group were given different values.
            ConfigError: one has a hook that runs after its gradient was accumulated.
        """
        changed = [group.follow() for group in self._groups]
        return any(changed)


def require_no_late_hook(name: str, parameter: Tensor) -> None:
    """Refuse hooks that run after a gradient was accumulated, which would see a part of it; ours may be there.

    Raises:
        ConfigError: the parameter has one.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    if not all(_is_ours(hook) for hook in hooks.values()):
        raise ConfigError(
            f"parameter {name} has a hook that runs after its gradient was accumulated, and a copy on another rank or "
            "replica, whose gradient is added later; use a hook of the gradient (register_hook), or an optimizer"
        )


def _is_ours(hook: object) -> bool:
    return isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), GradientBuckets)


def _memory(parameter: Tensor) -> _Memory:
    return parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, but for NaN; no matter in which memory."""
    if one is other or _memory(one) == _memory(other):
        return True
    if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    return torch.equal(one, other) or bool(torch.isclose(one, other, 0, 0, equal_nan=True).all())


def _share(parameter: nn.Parameter, source: nn.Parameter) -> None:
    """Give a parameter another one's memory; its gradient is converted with it, or dropped where the shape is another."""
    grad, parameter.grad = parameter.grad, None
    parameter.data = source.data
    if grad is not None and grad.shape == parameter.shape:
        parameter.grad = grad.to(parameter.device, gradient_dtype(parameter))
