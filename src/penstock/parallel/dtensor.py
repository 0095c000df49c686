"""A tensor's part on this process: all of it, or the shard of one that tensor parallelism has cut."""

from __future__ import annotations

import sys

import torch
from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor; the module that defines them is not loaded for models that have none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(tensor: Tensor) -> bool:
    """Whether processes hold different parts of it."""
    return is_dtensor(tensor) and any(not p.is_replicate() for p in tensor.placements)  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """The memory this process holds of a tensor; shared with it."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def move(parameter: Tensor, place: Tensor) -> None:
    """Let a parameter's part on this process be in other memory, which has its values already."""
    if is_dtensor(parameter):
        parameter._local_tensor = place  # type: ignore[attr-defined]  # as torch's fully_shard does
    else:
        parameter.data = place


def like(part: Tensor, whole: Tensor) -> Tensor:
    """A tensor cut as `whole` is, whose memory on this process is `part`."""
    if not is_dtensor(whole):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        whole.device_mesh,  # type: ignore[attr-defined]
        whole.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's ``.grad``: its own, or what it was told (``grad_dtype``, from torch 2.10 on)."""
    chosen: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return chosen if chosen is not None else parameter.dtype


def numbers_of(grad: Tensor) -> Tensor:
    """The real numbers that a gradient is made of: of a sparse one its values, of complex ones both parts.

    They share the gradient's memory, but for those of a sparse one that is not coalesced.
    """
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce().values()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Strides with which its elements fill memory without gaps; None if it leaves gaps or overlaps."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return None
        expected *= size
    return tensor.stride()


def runs_along(tensor: Tensor) -> tuple[int, list[slice]]:
    """Of a tensor that is cut: along which dimension, and which runs of it this process has, in their order."""
    (placement,) = tensor.placements  # type: ignore[attr-defined]
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    length, number = tensor.shape[placement.dim], mesh.get_local_rank()
    # A strided placement is of as many matrices side by side, each of which is cut.
    parts = getattr(placement, "split_factor", 1)
    each = -(-length // (parts * mesh.size()))  # as ``torch.chunk`` cuts
    width = length // parts
    starts = [part * width + number * each for part in range(parts)]
    return placement.dim, [slice(start, min(start + each, length)) for start in starts]


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor put together, where it is cut: its ranks all call it then."""
    if not is_dtensor(tensor):
        return tensor
    found: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return found


def distribute_like(tensor: Tensor, model: Tensor) -> Tensor:
    """A whole tensor cut as `model` is; its ranks all call it then."""
    if not is_dtensor(model) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, model.device_mesh, model.placements)  # type: ignore[attr-defined]


def redistribute_grad(parameter: Tensor) -> None:
    """Let ``.grad`` be cut as its parameter is, where autograd left it otherwise; its ranks all call it then."""
    grad = parameter.grad
    if grad is not None and is_dtensor(grad) and grad.placements != parameter.placements:  # type: ignore[attr-defined]
        parameter.grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
