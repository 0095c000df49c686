"""Tensors that share memory: which ones do, and whether one of them was written into."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.base.errors import PenstockError

OUTSIDE = -1
"""Group of tensors that share memory with one that travels by another way."""

_MAX_WORK = 100_000
"""Bound of NumPy's search for a common address; where it does not suffice, memory counts as shared."""


def storage_of(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None if it has no plain memory."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_meta or tensor.is_nested or not tensor.numel():
        return None
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size() or None


def groups_of(
    tensors: Sequence[Tensor], linked: Mapping[int, Hashable], outside: Sequence[Tensor] = ()
) -> list[int]:
    """Return for each tensor the number of its group of tensors that share memory; 0 if it shares none, or `OUTSIDE`.

    Views of one storage share memory if some element of it is in both: parts of a tensor as of ``chunk`` do not.

    Args:
        linked: by address of a storage, a key of storages that count as one, or `OUTSIDE`.
    """
    every = [*tensors, *outside]
    storages = [storage_of(tensor) for tensor in every]
    known = [storage for storage in storages if storage is not None]
    # The usual case, found without NumPy: every tensor has memory of its own.
    if len(set(known)) == len(known) and not any(storage in linked for storage in known):
        return [0] * len(tensors)
    twice = {storage for storage in known if known.count(storage) > 1}
    places = {n: (every[n].data_ptr(), _extent(every[n])) for n, s in enumerate(storages) if s in twice}
    groups: list[set[Hashable]] = []  # of indices and keys
    for n, storage in enumerate(storages):
        if storage is None:
            continue
        joined: set[Hashable] = {("tensor", n)}
        if storage in linked:
            joined.add(linked[storage])
        if n >= len(tensors):
            joined.add(OUTSIDE)
        near = {("tensor", m) for m in range(n) if storages[m] == storage and _share(*places[m], *places[n])}
        rest = []
        for group in groups:
            # OUTSIDE is a mark, and no tie between groups.
            if group & near or group & (joined - {OUTSIDE}):
                joined |= group
            else:
                rest.append(group)
        groups = [*rest, joined]
    found = [0] * len(tensors)
    for number, group in enumerate(groups, 1):
        members = [n for n in range(len(tensors)) if ("tensor", n) in group]
        if len(members) > 1 or OUTSIDE in group:
            for n in members:
                found[n] = OUTSIDE if OUTSIDE in group else number
    return found


def shares_memory(tensors: Sequence[Tensor]) -> bool:
    """Return whether one of some tensors is there twice, or shares memory with another."""
    return len({id(tensor) for tensor in tensors}) < len(tensors) or any(groups_of(tensors, {}))


_Extent = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides in bytes, and bytes of an element."""


def _extent(tensor: Tensor) -> _Extent:
    size = tensor.element_size()
    return tuple(tensor.shape), tuple(step * size for step in tensor.stride()), size


def _share(address: int, extent: _Extent, other_address: int, other: _Extent) -> bool:
    return (address == other_address and extent == other) or _common_address(
        other_address - address, extent, other
    )


@lru_cache(4096)
def _common_address(distance: int, one: _Extent, other: _Extent) -> bool:
    start = 1 << 40  # of memory that is never read
    try:
        one_array, other_array = _array(start, one), _array(start + distance, other)
        return np.shares_memory(one_array, other_array, _MAX_WORK)  # type: ignore[arg-type]  # too narrow in the stubs
    except np.exceptions.TooHardError:
        return True


def _array(address: int, extent: _Extent) -> Any:
    shape, strides, size = extent
    memory = {"data": (address, True), "shape": shape, "strides": strides}
    interface = {**memory, "typestr": f"|V{size}", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


class Watched(NamedTuple):
    """A tensor that shares memory with others of its group, which must not be written.

    Attributes:
        before: its version, or a copy where tensors have no version.
    """

    tensor: Tensor
    group: Hashable
    name: str
    before: int | Tensor

    @classmethod
    def of(cls, tensor: Tensor, group: Hashable, name: str) -> Watched:
        """Return the record of a tensor before layers run."""
        return cls(tensor, group, name, tensor.clone() if tensor.is_inference() else tensor._version)

    @property
    def written(self) -> bool:
        """True if it was written into."""
        if isinstance(self.before, Tensor):
            return not torch.equal(self.tensor, self.before)
        return self.tensor._version != self.before


def require_unwritten(watched: Sequence[Watched]) -> None:
    """Check that layers have not written into tensors that share memory."""
    for one in watched:
        if one.written:
            others = [other.name for other in watched if other.group == one.group and other is not one]
            with_what = ", ".join(others) if others else "the target, or a value that another layer was given"
            raise PenstockError(
                f"a layer writes in place into {one.name}, which shares memory with {with_what}; where the model is split, "
                "that would not see the write. Write into a copy (value.clone())"
            )
