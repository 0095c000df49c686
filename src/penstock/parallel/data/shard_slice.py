"""Which part of a parameter a replica has, and how parts become whole: what an optimizer keeps, divided and joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.encoding import sendable

ONE_A_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's elementwise optimizers keep once for a whole parameter (torch/optim/nadam.py, asgd.py)."""


@sendable
@dataclass(frozen=True)
class ShardSlice:
    """A run of a parameter's elements, in the order in which memory has them.

    Attributes:
        shape, stride: of the parameter.
        first: the first element.
        count: how many; it may be none.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    count: int

    def of(self, value: Tensor) -> Tensor:
        """The run out of a tensor of the parameter's shape, 1-d; shares its memory where that has the order."""
        if value.stride() != self.stride:
            whole = torch.empty_strided(self.shape, self.stride, dtype=value.dtype, device=value.device)
            value = whole.copy_(value)
        return value.as_strided((self.count,), (1,), value.storage_offset() + self.first)

    def holds(self, key: str, value: object) -> bool:
        """Whether an optimizer's entry for the run has a number for each of its elements."""
        return key not in ONE_A_PARAMETER and isinstance(value, Tensor) and value.shape == (self.count,)

    def covers(self, key: str, value: object) -> bool:
        """Whether an optimizer's entry for the parameter has a number for each of its elements."""
        return key not in ONE_A_PARAMETER and isinstance(value, Tensor) and tuple(value.shape) == self.shape


@dataclass(frozen=True)
class ShardValues:
    """The values of a `ShardSlice`, where a whole tensor could stand.

    Attributes:
        values: 1-d.
    """

    values: Tensor


def joined(pieces: Sequence[tuple[ShardSlice, Mapping[str, Any]]]) -> dict[str, Any]:
    """The entries of a whole parameter, made of those of all its pieces, where the first of them is."""
    piece, entries = pieces[0]
    size = torch.Size(piece.shape)
    found: dict[str, Any] = {}
    for key, sample in entries.items():
        if not piece.holds(key, sample):
            found[key] = sample
            continue
        flat = torch.empty_strided(size, piece.stride, dtype=sample.dtype, device=sample.device)
        line = flat.as_strided((size.numel(),), (1,))
        for one, own in pieces:
            line[one.first : one.first + one.count] = own[key]
        found[key] = flat
    return found
