"""A model whose head scores by the table of its embedding."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.support import plain

WORDS = 11


class Head(nn.Module):
    """Scores by the table of the embedding."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight = table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    table = nn.Embedding(WORDS, plain.WIDTH)
    return nn.Sequential(table, *plain.model(4), Head(table)).to(dtype)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (torch.randint(WORDS, (8,), generator=generator), torch.randint(WORDS, (8,), generator=generator))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float(), target)
