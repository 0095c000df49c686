"""Comparison of the values of two tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def same_values(one: Tensor, other: Tensor, exact: bool | None = None) -> bool:
    """Return whether two tensors have the same shape, dtype and values.

    Args:
        exact: True to compare bit for bit, False up to rounding; by default bit for bit on a CPU, whose kernels are
            deterministic.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if one.device.type == "cpu" if exact is None else exact:
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    difference = torch.linalg.vector_norm((one - other).double())
    # Sums of thousands of terms in another order differ by some tens of units in the last place.
    return bool(difference <= 100 * torch.finfo(one.dtype).eps * torch.linalg.vector_norm(other.double()))
