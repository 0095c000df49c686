"""Slices of parameters over replicas, and the division and joining of an optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.base.encoding import sendable

ONE_A_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})
"""State that torch's elementwise optimizers keep once for a whole parameter (torch/optim/nadam.py, asgd.py)."""


NOT_ELEMENTWISE = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})
"""Optimizers whose update of an element depends on other elements, so that sharding would change their results."""


@sendable
@dataclass(frozen=True)
class ShardSlice:
    """A range of a parameter's elements, in memory order.

    Attributes:
        whole: whether one replica has all of it, in its own shape.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    count: int
    whole: bool = False

    @classmethod
    def between(cls, value: Tensor, begin: int, end: int, whole: bool = False) -> ShardSlice:
        """Return the elements of a tensor from `begin` to before `end`, which may both lie outside of it."""
        first = max(0, begin)
        count = max(0, min(value.numel(), end) - first)
        return cls(tuple(value.shape), value.stride(), first if count else 0, count, whole)

    def of(self, value: Tensor) -> Tensor:
        """Return the slice of a tensor of the parameter's shape, 1-d unless whole; shares memory if strides are equal."""
        if value.stride() != self.stride:
            full = torch.empty_strided(self.shape, self.stride, dtype=value.dtype, device=value.device)
            value = full.copy_(value)
        if self.whole:
            return value
        return value.as_strided((self.count,), (1,), value.storage_offset() + self.first)

    def matches(self, key: str, value: object) -> bool:
        """Return whether an optimizer's state entry has one number for each element of the slice."""
        return key not in ONE_A_PARAMETER and isinstance(value, Tensor) and value.shape == (self.count,)

    def covers(self, key: str, value: object) -> bool:
        """Return whether an optimizer's state entry has one number for each element of the parameter."""
        return key not in ONE_A_PARAMETER and isinstance(value, Tensor) and tuple(value.shape) == self.shape


@dataclass(frozen=True)
class ShardValues:
    """Values of a `ShardSlice`, 1-d, in place of a full tensor."""

    values: Tensor


def join_shards(shards: Sequence[tuple[ShardSlice, Mapping[str, Any]]]) -> dict[str, Any]:
    """Join the optimizer state of all shards of a parameter, on the device of the first."""
    first, entries = shards[0]
    size = torch.Size(first.shape)
    state: dict[str, Any] = {}
    for key, sample in entries.items():
        if not first.matches(key, sample):
            state[key] = sample
            continue
        state[key] = torch.empty_strided(size, first.stride, dtype=sample.dtype, device=sample.device)
        flat = state[key].as_strided((size.numel(),), (1,))
        for shard, shard_state in shards:
            flat[shard.first : shard.first + shard.count] = shard_state[key]
    return state
