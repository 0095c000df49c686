"""Read, replace and restore the buffers of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from penstock.stage.same_values import same_values

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
    restores = [snapshot(buffer) for buffer in buffers]

    def restore() -> None:
        for (owner, name), buffer, write in zip(places, buffers, restores, strict=True):
            setattr(owner, name, buffer)
            write()

    return restore


def snapshot(tensor: Tensor) -> Callable[[], None]:
    """Copy a tensor; return a function that writes the values back if it has others.

    Else nothing is written, since some tensors cannot be written to: those that ``expand()`` makes, and memory that is only
    read.
    """
    mark, value = Mark(tensor), tensor.detach().clone()

    def restore() -> None:
        if not mark.holds(tensor):
            # Not through the tensor itself, or graphs of other microbatches would take this for a write of a forward's.
            tensor.data.copy_(value)

    return restore


class Mark:
    """A tensor as it is now, by which a later write is noticed."""

    def __init__(self, tensor: Tensor | None) -> None:
        self._place = _place(tensor)
        self._value = None if tensor is None or _counts_writes(tensor) else tensor.detach().clone()

    def holds(self, tensor: Tensor | None) -> bool:
        """Return whether it is this tensor, and nothing was written into it."""
        if _place(tensor) != self._place:
            return False
        return tensor is None or self._value is None or same_values(tensor, self._value, exact=True)


def _counts_writes(tensor: Tensor) -> bool:
    """Return whether all writes into a tensor are counted in its version.

    The kernel of batch normalisation does not count its own, into running statistics, which have one dimension.
    """
    if tensor.is_meta:
        return True
    return not tensor.is_inference() and not (tensor.dim() == 1 and tensor.is_floating_point())


def _place(tensor: Tensor | None) -> tuple[int, int]:
    return id(tensor), 0 if tensor is None or tensor.is_inference() else tensor._version
