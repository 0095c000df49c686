"""Cache of what layers are called with, by the tensors and the shapes that it follows from."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

# Values kept by shape; the least recently used one goes.
_MAX_ENTRIES = 32


class Same:
    """A tensor as part of a key: equal only to itself, until it is written to."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._hash = hash((id(tensor), _version(tensor)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self._hash != other._hash:
            return False
        tensor = self._tensor()
        return tensor is not None and tensor is other._tensor()


class ArgumentCache:
    """Values by key: those with an owner until it dies or is written to, others for the last few keys."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Hashable, Any] = OrderedDict()
        self._by_owner: dict[int, tuple[weakref.ref[Tensor], int, dict[Hashable, Any]]] = {}

    def get(self, owner: Tensor | None, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key; `make` makes it, and must not keep the owner alive."""
        if owner is None:
            if key not in self._by_key:
                self._by_key[key] = make()
                if len(self._by_key) > _MAX_ENTRIES:
                    self._by_key.popitem(last=False)
            self._by_key.move_to_end(key)
            return self._by_key[key]
        of_owner = self._of(owner)
        if key not in of_owner:
            of_owner[key] = make()
        return of_owner[key]

    def _of(self, owner: Tensor) -> dict[Hashable, Any]:
        number, version = id(owner), _version(owner)
        entry = self._by_owner.get(number)
        if entry is None or entry[0]() is not owner or entry[1] != version:
            # The callback runs before another tensor can have this id.
            reference = weakref.ref(owner, lambda _: self._by_owner.pop(number, None))
            entry = self._by_owner[number] = (reference, version, {})
        return entry[2]


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written to; 0 for inference tensors, which do not count and live briefly."""
    return 0 if tensor.is_inference() else tensor._version
