"""Saved tensors in host memory between the forward and the backward, for stages on a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class offloaded(saved_tensors_hooks):  # noqa: N801 - used as a context manager, like torch's own hooks
    """Context in which tensors that autograd saves are moved to pinned host memory, and back for the backward.

    As ``torch.autograd.graph.save_on_cpu``, but weights stay where they are, since nothing would be gained by copies of
    them, and a tensor comes back with the strides it had: a product of transposed tensors may have other bits. Sparse
    tensors and tensors of subclasses stay, too.

    Args:
        kept: tensors that stay on the GPU, with all their views; on the CPU, or of subclasses, they are left alone anyway.
    """

    def __init__(self, kept: Iterable[Tensor]) -> None:
        memory = {
            t.untyped_storage().data_ptr()
            for t in kept
            if t.device.type == "cuda" and not hasattr(t, "device_mesh")
        }

        def pack(tensor: Tensor) -> tuple[Tensor, torch.device]:
            plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type != "cpu"
            if not plain or tensor.untyped_storage().data_ptr() in memory:
                return tensor, tensor.device
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            return host.copy_(tensor, non_blocking=True), tensor.device

        def unpack(packed: tuple[Tensor, torch.device]) -> Tensor:
            tensor, device = packed
            return tensor.to(device, non_blocking=True)

        super().__init__(pack, unpack)
