"""Activation recompute: which layers drop what their forward saved, and the run of layers that share a graph.

A stage is cut into segments. A kept segment keeps its graph from forward to backward; a recomputed one keeps its
inputs only, and runs again just before its backward, with the same random numbers (1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.stage.compute.footprint import refuses_hooks

Policy = str | int
"""``"none"``, ``"full"`` (every layer), a number k (every k-th layer), or ``"auto"`` (as few as a limit allows)."""


@dataclass(frozen=True)
class Segment:
    """Layers `start` to `stop` - 1 of a stage, and whether they are computed again for their backward."""

    start: int
    stop: int
    recompute: bool


def require_policy(policy: object) -> Policy:
    """Check what a user gave.

    Raises:
        ConfigError: it is no policy.
    """
    if isinstance(policy, int) and not isinstance(policy, bool) and policy >= 1:
        return policy
    if isinstance(policy, str) and policy in ("none", "full", "auto"):
        return policy
    raise ConfigError(
        f"recompute must be 'none', 'full', 'auto', or k to recompute every k-th layer, not {policy!r}"
    )


def chosen(policy: Policy, layers: int) -> list[bool]:
    """For each of a stage's layers, whether it is recomputed; ``"auto"`` begins with all of them."""
    if policy == "none":
        return [False] * layers
    if isinstance(policy, str):
        return [True] * layers
    return [n % policy == policy - 1 for n in range(layers)]


def segments(recomputed: Sequence[bool]) -> tuple[Segment, ...]:
    """Cut: each recomputed layer on its own, so that one at a time comes back; kept neighbours together."""
    found: list[Segment] = []
    for n, again in enumerate(recomputed):
        if found and not again and not found[-1].recompute:
            found[-1] = Segment(found[-1].start, n + 1, False)
        else:
            found.append(Segment(n, n + 1, again))
    return tuple(found)


@contextmanager
def nothing_saved() -> Iterator[None]:
    """Within it a forward knows what would need a gradient, but keeps nothing for a backward.

    With gradients off instead, modules and kernels may choose another path and give other last bits.
    """

    def unpack(_: object) -> Tensor:
        raise ConfigError(
            "a layer computes gradients in its forward (torch.autograd.grad), so what its forward saves cannot be dropped; "
            "use recompute='none'"
        )

    with (
        transforms_refused("recompute='none'"),
        torch.autograd.graph.saved_tensors_hooks(lambda _: None, unpack),
    ):
        yield


@contextmanager
def transforms_refused(instead: str) -> Iterator[None]:
    """Within it, a ``torch.func`` transform that refuses to run under hooks on saved tensors is an error that says so.

    Args:
        instead: the option that does without such hooks.
    """
    try:
        yield
    except RuntimeError as error:
        if not refuses_hooks(error):
            raise
        raise ConfigError(
            f"a layer calls torch.func.grad or its kin, which PyTorch does not run under hooks on saved tensors; "
            f"use {instead}"
        ) from error


class Buffers:
    """The buffers of a segment that its forward changes (running statistics, counters): they change once, not twice."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        owners = dict.fromkeys(owner for module in modules for owner in module.modules())
        self._all = [(owner, name) for owner in owners for name, _ in owner.named_buffers(recurse=False)]
        self._changing: dict[bool, list[tuple[nn.Module, str]]] = {}

    def during(self, forward: Callable[[], None]) -> list[Tensor]:
        """Run a forward; returns what the changing buffers were before it."""
        training = self._training
        watched = self._changing.get(training, self._all)
        if not watched:
            forward()
            return []
        before = [_buffer(*place).clone() for place in watched]
        forward()
        if training not in self._changing:
            # By value: the kernel of batch normalisation does not count its writes.
            moved = [not torch.equal(_buffer(*at), old) for at, old in zip(watched, before, strict=True)]
            self._changing[training] = [at for at, m in zip(watched, moved, strict=True) if m]
            before = [old for old, m in zip(before, moved, strict=True) if m]
        return before

    @property
    def _training(self) -> bool:
        return any(module.training for part in self._modules for module in part.modules())

    @contextmanager
    def again(self, before: Sequence[Tensor]) -> Iterator[None]:
        """Within it the modules have buffers of the values before the first forward; afterwards their own again.

        The second forward so sees what the first one saw, and what it saves of them nobody writes to later.
        """
        places = self._changing.get(self._training, []) if before else []
        own = [_buffer(*place) for place in places]
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)
        try:
            yield
        finally:
            for (module, name), value in zip(places, own, strict=True):
                setattr(module, name, value)


def _buffer(module: nn.Module, name: str) -> Tensor:
    return module.get_buffer(name)
