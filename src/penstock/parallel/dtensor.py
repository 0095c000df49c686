"""Helpers for DTensors that also accept plain tensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: Tensor) -> TypeIs[DTensor]:
    """Return whether a tensor is a DTensor, without loading torch's module for models that have none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether processes hold different shards of a tensor."""
    return is_dtensor(tensor) and any(not p.is_replicate() for p in tensor.placements)


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or the tensor itself; shares its memory."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def set_local(parameter: Tensor, memory: Tensor) -> None:
    """Replace the memory of a parameter's local shard by other memory, which must have its values already."""
    if is_dtensor(parameter):
        parameter._local_tensor = memory  # as torch's fully_shard does
    else:
        parameter.data = memory


def from_local_like(shard: Tensor, model: Tensor) -> Tensor:
    """Return a tensor distributed as `model` is, with `shard` as its local memory."""
    if not is_dtensor(model):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard,
        model.device_mesh,
        model.placements,
        run_check=False,
        shape=model.shape,
        stride=model.stride(),
    )


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's ``.grad``: its ``grad_dtype`` unless that is None, which allows any dtype."""
    return parameter.grad_dtype or parameter.dtype


def real_values(grad: Tensor) -> Tensor:
    """Return a gradient as a dense real tensor: the values of a sparse one, real and imaginary parts of a complex one.

    The result shares the gradient's memory, except for a sparse one that is not coalesced.
    """
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce().values()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def dense_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return a tensor's strides if its elements fill memory without gaps or overlaps; otherwise None."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return None
        expected *= size
    return tensor.stride()


def local_slices(tensor: DTensor) -> tuple[int, list[slice]]:
    """Return the dimension along which a DTensor is sharded, and this process's slices of it, in order."""
    placement: Any  # a shard, strided or not
    (placement,) = tensor.placements
    mesh = tensor.device_mesh
    length, rank = tensor.shape[placement.dim], mesh.get_local_rank()
    # A strided placement shards each of several matrices that lie side by side.
    matrices = getattr(placement, "split_factor", 1)
    each = -(-length // (matrices * mesh.size()))  # rounded up, as in ``torch.chunk``
    width = length // matrices
    starts = [matrix * width + rank * each for matrix in range(matrices)]
    return placement.dim, [slice(start, min(start + each, length)) for start in starts]


def boxes_in_whole(tensor: DTensor) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Return where this process's shard of a DTensor is in the whole tensor, without communication.

    Returns:
        (start in the shard, size, start in the whole tensor) of each box; a strided placement has several.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    origin = (0,) * len(size)
    if len(tensor.placements) > 1 or not hasattr(tensor.placements[0], "split_factor"):
        return [(origin, size, first)]
    dim, slices = local_slices(tensor)
    boxes, begin = [], 0
    for each in slices:
        count = max(0, each.stop - each.start)
        start, width, place = list(origin), list(size), list(origin)
        start[dim], width[dim], place[dim] = begin, count, each.start
        boxes.append((tuple(start), tuple(width), tuple(place)))
        begin += count
    return boxes


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, which all its ranks must call, or a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    full: Tensor = tensor.full_tensor()
    return full


def distribute_like(tensor: Tensor, model: Tensor) -> Tensor:
    """Distribute a full tensor as `model` is; if that is a DTensor, all its ranks must call it."""
    if not is_dtensor(model) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, model.device_mesh, model.placements)


def redistribute_grad(parameter: Tensor) -> None:
    """Redistribute ``.grad`` as its parameter is, if autograd left it otherwise; then all its ranks must call it."""
    grad = parameter.grad
    if grad is None or not is_dtensor(grad) or not is_dtensor(parameter):
        return
    if grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)
