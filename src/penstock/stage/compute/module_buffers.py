"""Read, replace and restore the buffers of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

BufferPlace = tuple[nn.Module, str]
"""(Module that owns a buffer, name of the buffer in it)."""


def buffer_places(modules: Iterable[nn.Module]) -> list[BufferPlace]:
    """Return the places of all buffers of these modules and the modules within them."""
    owners = dict.fromkeys(owner for module in modules for owner in module.modules())
    return [
        (owner, name)
        for owner in owners
        for name, _ in owner.named_buffers("", False, remove_duplicate=False)
    ]


def get_buffers(places: Iterable[BufferPlace]) -> list[Tensor]:
    """Return the buffers at these places."""
    return [owner.get_buffer(name) for owner, name in places]


@contextmanager
def replaced_buffers(places: Sequence[BufferPlace], values: Sequence[Tensor]) -> Iterator[None]:
    """Put other tensors in the buffers' places within the body, and the buffers themselves back afterwards."""
    buffers = get_buffers(places)
    for (owner, name), value in zip(places, values, strict=True):
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), buffer in zip(places, buffers, strict=True):
            setattr(owner, name, buffer)


def snapshot_buffers(module: nn.Module) -> Callable[[], None]:
    """Copy a module's buffers; return a function that restores them, so that a forward can run again."""
    places = buffer_places([module])
    buffers = get_buffers(places)
    values = [buffer.clone() for buffer in buffers]
    versions = [None if buffer.is_inference() else buffer._version for buffer in buffers]

    def restore() -> None:
        with torch.no_grad():
            for (owner, name), buffer, value, version in zip(places, buffers, values, versions, strict=True):
                setattr(owner, name, buffer)
                # Some cannot be written to, as those that expand() makes.
                if version is None or buffer._version != version:
                    buffer.copy_(value)

    return restore
