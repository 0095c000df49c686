"""A copy of the weights and the optimizer state that a step changes, so that the step can be undone bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from penstock.parallel.dtensor import local


class UpdateCopy:
    """The copy of one rank's weights and optimizer state.

    It takes as many bytes as the weights that have gradients and their state, such as 12 bytes per parameter for AdamW in
    fp32 and 8 for SGD with momentum. They are allocated when `take` is first called, and used again.

    Args:
        optimizer: the rank's optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._spare: dict[tuple[int, str], Tensor] = {}  # by the id of the weight, and the entry of its state
        self._copied: list[tuple[Tensor, Tensor]] = []
        self._weights: list[Tensor] = []
        self._states: dict[Tensor, dict[str, Any]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the copies."""
        return sum(t.numel() * t.itemsize for t in self._spare.values())

    @torch.no_grad()
    def take(self) -> None:
        """Copy weights and state, before a step."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        self._weights = [p for group in groups for p in group["params"] if p.grad is not None]
        self._states = {
            p: {k: v if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in state[p].items()}
            for p in self._weights
            if p in state
        }
        found = {(id(p), ""): local(p.detach()) for p in self._weights}
        for p, entries in self._states.items():
            found |= {(id(p), key): value for key, value in entries.items() if isinstance(value, Tensor)}
        self._spare = {key: self._fitting(key, tensor) for key, tensor in found.items()}
        self._copied = [(tensor, self._spare[key]) for key, tensor in found.items()]
        if self._copied:
            tensors, spares = zip(*self._copied, strict=True)
            torch._foreach_copy_(spares, tensors)

    def _fitting(self, key: tuple[int, str], tensor: Tensor) -> Tensor:
        spare = self._spare.get(key)
        if spare is None or (spare.shape, spare.dtype) != (tensor.shape, tensor.dtype):
            return torch.empty_like(tensor)
        return spare

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the step since `take`."""
        state = self._optimizer.state
        if self._copied:
            tensors, spares = zip(*self._copied, strict=True)
            torch._foreach_copy_(tensors, spares)
        for parameter in self._weights:
            if parameter in self._states:
                state[parameter] = self._states[parameter]
            else:
                state.pop(parameter, None)
