"""A tied table that is read at three places: by the embedding, by the head, and by a head for a second token.

It is here because pytest rewrites the code of test files, and `penstock.split` wants the code that its source shows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH = 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class SecondToken(nn.Module):
    """The head comes before the table in the model's own order, and after it in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        one = self.head(x)
        two = F.linear(self.second(x) + self.embedding(ids), self.embedding.weight)
        return one + 0.5 * two


def made() -> SecondToken:
    """Return the model with weights that are always the same."""
    torch.manual_seed(0)
    return SecondToken()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch() -> tuple[Tensor, Tensor]:
    """Return token ids and labels, int64 (8, 6)."""
    ids = torch.randint(0, VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(1))
    return ids, ids.roll(1, 1)
