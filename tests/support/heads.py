"""Heads over a vocabulary: plain, capped, and one whose logits are needed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

CLASSES, WIDTH = 53, 16


class Capped(nn.Module):
    """A head whose logits are scaled and capped, as those of Gemma 2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(self.norm(x)) / 3.0) * 3.0


class Chosen(nn.Module):
    """A head whose logits are needed: a mask is written into them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        logits[..., 0] = -1e4
        return logits


HEADS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, CLASSES),
    "capped": Capped,
    "chosen": Chosen,
}
