"""What a step is compared by."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


@dataclass
class Step:
    """What is known of a step.

    Attributes:
        losses: by microbatch of the whole batch.
        evaluated: losses of an evaluation before it, if there was one.
        gradients: by the parameter's name, before clipping; None for a parameter without one.
        buffers: by name, after it.
        weights: by the parameter's name, after it and its update.
    """

    losses: Tensor
    evaluated: Tensor | None
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass
class Raised:
    """An error instead of a step.

    Attributes:
        kind: the exception's class.
        known: whether it is of the PenstockError tree.
        told: whether it says no more than that another rank failed, or a wait ran out.
        message: what it said.
        untouched: whether weights were as before the step, and the step was not counted.
    """

    kind: str
    known: bool
    told: bool
    message: str
    untouched: bool


@dataclass
class Run:
    """Steps, up to an error if there was one."""

    steps: list[Step] = field(default_factory=list)
    raised: Raised | None = None


def copied(tensor: Tensor | None) -> Tensor | None:
    """Its values now; a parameter that has no shape yet has none."""
    if tensor is None:
        return None
    if is_lazy(tensor):
        return torch.empty(0)
    return tensor.detach().clone()


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Bit for bit, and of one dtype; a NaN is equal to a NaN."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = dense(one.detach()), dense(other.detach())
    return torch.equal(one, other) or bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
