"""Memory that a microbatch keeps alive between its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from penstock.stage.compute.module_buffers import snapshot_buffers
from penstock.stage.values import Message, leaves_of


class Footprint:
    """Bytes of distinct storages, without a module's own parameters and buffers.

    Args:
        batch: values of the whole batch. Microbatches are views of its storages, so of these only the views count, and
            each byte once.
    """

    def __init__(self, module: nn.Module, batch: Iterable[object] = ()) -> None:
        self._module = module
        self._excluded = {_key(t) for t in (*module.parameters(), *module.buffers())}
        self._batch = {_key(leaf) for value in batch for leaf in leaves_of(value) if _is_strided(leaf)}
        self._sizes: dict[int, dict[tuple[int, int], int]] = {}  # of each storage, by ranges of addresses

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once."""
        try:
            key = _key(tensor)
        except RuntimeError:  # a tensor wrapped by a torch.func transform has no storage
            return
        if key in self._excluded:
            return
        ranges = self._sizes.setdefault(key, {})
        if key in self._batch and _is_strided(tensor):
            first = tensor.data_ptr()
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            end = first + (last + 1) * tensor.element_size() if tensor.numel() else first
            ranges[first, end] = max(tensor.nbytes, ranges.get((first, end), 0))
        else:
            whole = _storage(tensor).nbytes()
            ranges[key, key + whole] = whole

    def replace(self, copy: Tensor, original: Tensor) -> None:
        """Count a tensor's storage instead of its copy's, if that was counted."""
        if self._sizes.pop(_key(copy), None) is not None:
            self.add(original)

    @property
    def bytes(self) -> int:
        return sum(map(_covered, self._sizes.values()))

    def of(self, tensors: Iterable[Tensor]) -> int:
        """Count these tensors; return the bytes of all tensors so far."""
        for tensor in tensors:
            self.add(tensor)
        return self.bytes

    def of_messages(self, messages: Iterable[Message]) -> int:
        """Count the tensors of these messages; return the bytes of all tensors so far."""
        return self.of(x for message in messages for x in message.leaves if isinstance(x, Tensor))

    def run(self, call: Callable[[], Any]) -> Any:
        """Call a forward and count the tensors that autograd saves for its backward.

        ``torch.func.grad`` and its kin do not run under the hooks that count. A forward that calls them runs again
        without the hooks, from the same buffers, and counts nothing.
        """

        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            self.add(tensor)
            # Detached, so that a saved output does not keep its own graph alive.
            return tensor.detach(), tensor._version

        restore_buffers = snapshot_buffers(self._module)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                return call()
        except RuntimeError as error:
            if not refuses_hooks(error):
                raise
        restore_buffers()
        self._sizes.clear()
        return call()


def _unpack(saved: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor; raise if it was modified since, which autograd checks only where no hooks are set."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
            f"shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
    return tensor


def refuses_hooks(error: RuntimeError) -> bool:
    """Return whether an error comes from a ``torch.func`` transform under hooks on saved tensors."""
    return "support saved tensor hooks" in str(error)


def _covered(ranges: Mapping[tuple[int, int], int]) -> int:
    """Return the bytes in ranges of addresses that may overlap, each with the bytes of the tensor that spans it.

    A tensor that is cut along another dimension than its first spans the other microbatches' bytes, too.
    """
    total = size = 0
    begin = end = -1
    for (first, last), own in sorted(ranges.items()):
        if first >= end:
            total += min(size, end - begin)
            begin, end, size = first, last, 0
        end, size = max(end, last), size + own
    return total + min(size, end - begin)


def _is_strided(leaf: object) -> TypeGuard[Tensor]:
    """Return whether a leaf is a tensor whose elements have addresses."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _key(tensor: Tensor) -> int:
    return _storage(tensor).data_ptr()


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    to_local = getattr(tensor, "to_local", None)  # of a DTensor, the local shard
    if to_local is not None:
        with torch.no_grad():
            tensor = to_local()
    wait = getattr(tensor, "trigger_wait", None)  # of the result of an asynchronous collective
    if wait is not None:
        tensor = wait()
    return tensor.untyped_storage()
