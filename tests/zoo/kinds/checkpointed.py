"""Activation checkpointing (torch.utils.checkpoint)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.zoo.kind import WIDTH, Inner, kind


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


@kind()
class CheckpointReentrant(Twice):
    """checkpoint(use_reentrant=True)"""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x if x.requires_grad else x.clone().requires_grad_(), use_reentrant=True)


@kind()
class Checkpoint(Twice):
    """checkpoint(use_reentrant=False) around two linears"""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


@kind()
class CheckpointOfRowsByRows(Inner):
    """checkpoint around a linear with as many rows as columns"""

    def forward(self, x: Tensor) -> Tensor:
        square = (x[:, :, None] * torch.linspace(-1, 1, WIDTH)).transpose(1, 2)
        return x + checkpoint(self.body, square, use_reentrant=False).mean(1)

    def body(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(self.inner(rows)) for rows in x])


@kind()
class CheckpointNested(Twice):
    """a checkpoint within a checkpoint"""

    def within(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, torch.sin(x), use_reentrant=False) + x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.within, x, use_reentrant=False)


@kind()
class CheckpointOfAPart(Twice):
    """checkpoint around a part of a layer, whose linear is used outside, too"""

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.sin(self.inner(checkpoint(self.body, x, use_reentrant=False))))


@kind()
class CheckpointSequential(nn.Module):
    """checkpoint_sequential"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.inner, 2, x, use_reentrant=False)


@kind(refused=r"draws random numbers within torch\.utils\.checkpoint")
class CheckpointWithDropout(nn.Module):
    """dropout within checkpoint"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)
