"""Activation recompute: the layers that drop their saved tensors, and the segments of layers that share a graph.

A stage is split into segments. A kept segment keeps its graph from forward to backward; a recomputed one keeps only its
inputs, and runs again just before its backward, with the same random numbers (1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.base.counts import is_count
from penstock.base.errors import ConfigError
from penstock.stage.compute.footprint import refuses_hooks
from penstock.stage.compute.module_buffers import BufferPlace, buffer_places, get_buffers, replaced_buffers
from penstock.stage.module import modes_of

Policy = str | int
"""``"none"``, ``"full"`` (every layer), a number k (every k-th layer), or ``"auto"`` (as few as a limit allows)."""


@dataclass(frozen=True)
class Segment:
    """Layers `start` to `stop` - 1 of a stage, and whether they are computed again for their backward."""

    start: int
    stop: int
    recompute: bool


def require_policy(policy: object) -> Policy:
    """Return a user's recompute policy."""
    if is_count(policy):
        return policy
    if isinstance(policy, str) and policy in ("none", "full", "auto"):
        return policy
    raise ConfigError(
        f"recompute must be 'none', 'full', 'auto', or k to recompute every k-th layer, got {policy!r}"
    )


def recomputed_layers(policy: Policy, layers: int) -> list[bool]:
    """Return for each layer of a stage whether it is recomputed; ``"auto"`` begins with all of them."""
    if policy == "none":
        return [False] * layers
    if isinstance(policy, str):
        return [True] * layers
    return [n % policy == policy - 1 for n in range(layers)]


def make_segments(recomputed: Sequence[bool]) -> tuple[Segment, ...]:
    """Group layers into segments: each recomputed layer alone, so that one at a time is held; kept neighbours together."""
    segments: list[Segment] = []
    for n, recompute in enumerate(recomputed):
        if segments and not recompute and not segments[-1].recompute:
            segments[-1] = Segment(segments[-1].start, n + 1, False)
        else:
            segments.append(Segment(n, n + 1, recompute))
    return tuple(segments)


@contextmanager
def nothing_saved() -> Iterator[None]:
    """Run the body with gradients enabled, but save nothing for a backward.

    Under ``torch.no_grad`` modules and kernels may choose another path, which gives other last bits.
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
    """Explain the error of a ``torch.func`` transform that does not run under hooks on saved tensors."""
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
    """Buffers that a segment's forward changes (running statistics, counters); two forwards change them once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._all = buffer_places(modules)
        self._changing: dict[tuple[bool, ...], list[BufferPlace]] = {}  # by the modules' modes

    def run_first(self, forward: Callable[[], None]) -> list[Tensor]:
        """Run the first forward; return the values of the changing buffers before it."""
        if not self._all:
            forward()
            return []
        modes = modes_of(self._modules)
        watched = self._changing.get(modes, self._all)
        if not watched:
            forward()
            return []
        before = [buffer.clone() for buffer in get_buffers(watched)]
        forward()
        if modes not in self._changing:
            # By value: the kernel of batch normalisation does not count its writes.
            now = get_buffers(watched)
            changed = [n for n, old in enumerate(before) if not torch.equal(now[n], old)]
            self._changing[modes] = [watched[n] for n in changed]
            before = [before[n] for n in changed]
        return before

    def restored(self, before: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a context in which the changing buffers are those from before the first forward.

        So the second forward sees the same values as the first, and nothing later writes to what it saves of them.
        """
        return replaced_buffers(self._changing[modes_of(self._modules)] if before else [], before)
