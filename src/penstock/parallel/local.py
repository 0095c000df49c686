"""A tensor's part on this process: all of it, or the shard of one that tensor parallelism has cut."""

from __future__ import annotations

import sys

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; the module that defines them is not loaded for models that have none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The memory this process holds of a tensor; shared with it."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def like(part: Tensor, whole: Tensor) -> Tensor:
    """A tensor cut as `whole` is, whose memory on this process is `part`."""
    if not is_sharded(whole):
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


def strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Strides with which its elements fill memory without gaps; None if it leaves gaps or overlaps."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return None
        expected *= size
    return tensor.stride()
