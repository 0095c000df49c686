"""An update part by part, whose moments go to files as they are made.

Optimizers of torch make their moments in their first step, all in host memory. So they update some weights at a time: those
without a gradient are left alone. What they keep for each weight is known from a trial on a tiny one before, and its room is
allocated before anything is updated: a full disk is an error at the start, and never half an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from penstock.parallel.host_store.memory import HostMemory

_PART_BYTES = 16 << 20
"""Bytes of weights that are updated together, unless one has more."""


class PartedUpdate:
    """Updates of weights whose moments are in files."""

    def __init__(self) -> None:
        # By optimizer: by number of a weight, and key of what is kept for it.
        self._rooms: WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[int, str], Tensor]] = (
            WeakKeyDictionary()
        )

    def prepare(self, optimizer: torch.optim.Optimizer, memory: HostMemory) -> None:
        """Have room for what torch's own optimizers keep; what others keep stays in host memory."""
        kept = [
            (id(p), key, p, dtype)
            for made in _parts_of(optimizer)
            if _is_torchs(made)
            for group in made.param_groups
            for p in group["params"]
            if p.requires_grad and p.dim()
            for key, dtype in _kept(made, group, p).items()
        ]
        size = sum(p.numel() * dtype.itemsize for _, _, p, dtype in kept)
        memory.require(size, "what the optimizer keeps")
        if memory.on_disk:
            self._rooms[optimizer] = {
                (number, key): memory.empty(p.numel(), dtype).as_strided(p.shape, p.stride())
                for number, key, p, dtype in kept
            }

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the weights that have gradients."""
        rooms = self._rooms.get(optimizer)
        if not rooms or not all(map(_is_torchs, _parts_of(optimizer))):
            optimizer.step()
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        for part in _cut(list(zip(parameters, gradients, strict=True))):
            for p, gradient in part:
                p.grad = gradient
            optimizer.step()
            for p, _ in part:
                p.grad = None
                _move(p, optimizer.state.get(p, {}), rooms)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


def _move(parameter: Tensor, state: dict[str, Any], rooms: Mapping[tuple[int, str], Tensor]) -> None:
    """Move what is kept for a weight to its files, if it is not there."""
    for key, value in state.items():
        room = rooms.get((id(parameter), key))
        if room is not None and value is not room:
            state[key] = room.copy_(value)


def _cut(pairs: list[tuple[Tensor, Tensor | None]]) -> Iterator[list[tuple[Tensor, Tensor | None]]]:
    part: list[tuple[Tensor, Tensor | None]] = []
    size = 0
    for pair in pairs:
        if part and size + pair[0].nbytes > _PART_BYTES:
            yield part
            part, size = [], 0
        part.append(pair)
        size += pair[0].nbytes
    if part:
        yield part


def _parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that one consists of."""
    return [made for _, made in getattr(optimizer, "parts", (((), optimizer),))]


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def _kept(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> dict[str, torch.dtype]:
    """Return what an optimizer of torch keeps for a weight in tensors of its shape, by key; a tiny one's step shows it."""
    tiny = nn.Parameter(torch.ones([2] * parameter.dim(), dtype=parameter.dtype, device="cpu"))
    tiny.grad_dtype = None
    tiny.grad = torch.ones_like(tiny, dtype=parameter.grad_dtype or parameter.dtype)
    kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
    made = kind([{**group, "params": [tiny]}])
    made.step()
    return {
        key: value.dtype
        for key, value in made.state[tiny].items()
        if isinstance(value, Tensor) and value.shape == tiny.shape
    }
