"""How a tensor that is not contiguous lies in memory, so that another process can lay it out in the same way.

Kernels choose by strides in which order they add, so a value has plain PyTorch's bits on the other side only if it has the
same strides there. What travels is the memory that the tensor spans, as it is: for one without gaps (transposed, channels
last, expanded) no more than its elements, and no copy is made for it. Where gaps are more than half of that memory, the
elements travel, and the receiver spreads them out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Strided(NamedTuple):
    """The place of a tensor's elements in memory.

    Attributes:
        shape: of the tensor.
        strides: of the tensor, in elements.
        conj: whether the elements in memory are the conjugates of its own.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool

    @staticmethod
    def of(tensor: Tensor) -> Strided | None:
        """How a tensor lies in memory; None for the usual way, row after row without gaps."""
        strides, expected, usual = tensor.stride(), 1, True
        for size, stride in zip(reversed(tensor.shape), reversed(strides), strict=True):
            usual = usual and stride == expected
            expected *= max(size, 1)
        conj = tensor.is_conj()
        if not tensor.numel() or (usual and not conj):
            return None
        return Strided(tuple(tensor.shape), tuple(strides), conj)

    @property
    def extent(self) -> int:
        """Elements from the first one's place in memory to the last one's."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def spread(self) -> bool:
        """Whether the elements travel without the gaps between them."""
        return self.extent > 2 * torch.Size(self.shape).numel()

    @property
    def travels(self) -> tuple[int, ...]:
        """The shape of what travels."""
        return self.shape if self.spread else (self.extent,)

    def leave(self, tensor: Tensor) -> Tensor:
        """What travels of a tensor: a view of its memory."""
        tensor = tensor.conj() if self.conj else tensor
        return tensor if self.spread else tensor.as_strided((self.extent,), (1,))

    def arrive(self, given: Tensor) -> Tensor:
        """The tensor, of what has travelled."""
        if self.spread:
            memory = given.new_empty(self.extent)
            memory.as_strided(self.shape, self.strides).copy_(given)
            given = memory
        tensor = given.as_strided(self.shape, self.strides)
        return tensor.conj() if self.conj else tensor
