"""Memory layout of a tensor that is not contiguous, so that another process can restore it.

Kernels choose by strides in which order they add, so a value has plain PyTorch's bits in another process only if it has the
same strides there. Therefore the memory that a tensor spans is sent unchanged. For one without gaps (transposed, channels
last, expanded) that is at most its elements, without a copy. If more than half of that memory is gaps, only the elements are
sent, and the receiver restores the gaps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Strided(NamedTuple):
    """Positions of a tensor's elements in memory.

    Attributes:
        strides: strides of the tensor, in elements.
        conj: whether the tensor's conjugate bit is set, so that memory has the conjugates of its elements.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool

    @staticmethod
    def of(tensor: Tensor) -> Strided | None:
        """Return the memory layout of a tensor; None if it is contiguous or empty."""
        strides, expected, contiguous = tensor.stride(), 1, True
        for size, stride in zip(reversed(tensor.shape), reversed(strides), strict=True):
            contiguous = contiguous and stride == expected
            expected *= max(size, 1)
        conj = tensor.is_conj()
        if not tensor.numel() or (contiguous and not conj):
            return None
        return Strided(tuple(tensor.shape), tuple(strides), conj)

    @property
    def extent(self) -> int:
        """Number of elements in the memory that the tensor spans."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def mostly_gaps(self) -> bool:
        """True if gaps are more than half of that memory, so that only the elements are sent."""
        return self.extent > 2 * torch.Size(self.shape).numel()

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that is sent."""
        return self.shape if self.mostly_gaps else (self.extent,)

    def sent_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor to send: a view of the memory of `tensor`."""
        tensor = tensor.conj() if self.conj else tensor
        return tensor if self.mostly_gaps else tensor.as_strided((self.extent,), (1,))

    def restore(self, received: Tensor) -> Tensor:
        """Return the tensor with its strides from the one that was sent."""
        if self.mostly_gaps:
            memory = received.new_empty(self.extent)
            memory.as_strided(self.shape, self.strides).copy_(received)
            received = memory
        tensor = received.as_strided(self.shape, self.strides)
        return tensor.conj() if self.conj else tensor
