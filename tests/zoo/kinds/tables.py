"""Embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.kind import WIDTH, Layer, kind

COUNT = 11
SPARSE = {
    "optimizers": ("sgd", "adagrad"),
    "clip": False,
    "refused": r"got a sparse gradient, and replicas",
    "when": "copies",
}


def words(x: Tensor) -> Tensor:
    """A word for every row and column, from the value."""
    return (x.detach().float() * 3).long().remainder(COUNT)


class Looked(nn.Module):
    """Adds to a value what a table says of the words in it."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(words(x)).mean(1)


@kind()
def embedding():
    """nn.Embedding"""
    return Looked(nn.Embedding(COUNT, WIDTH))


@kind()
def embedding_padding():
    """nn.Embedding with padding_idx"""
    return Looked(nn.Embedding(COUNT, WIDTH, padding_idx=0))


@kind()
def embedding_negative_padding():
    """nn.Embedding with a negative padding_idx and scale_grad_by_freq"""
    return Looked(nn.Embedding(COUNT, WIDTH, padding_idx=-2, scale_grad_by_freq=True))


@kind(
    writes=True,
    refused=r"the forward writes into parameter|returns something else",
    when="copies or recompute",
)
def embedding_max_norm():
    """nn.Embedding with max_norm, which writes into its weight in the forward"""
    return Looked(nn.Embedding(COUNT, WIDTH, max_norm=1.0))


@kind(**SPARSE)
def embedding_sparse():
    """nn.Embedding with sparse gradients"""
    return Looked(nn.Embedding(COUNT, WIDTH, sparse=True))


class Bag(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(COUNT, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(words(x))


@kind()
def embedding_bag():
    """nn.EmbeddingBag"""
    return Bag(mode="mean")


@kind(**SPARSE)
def embedding_bag_sparse():
    """nn.EmbeddingBag with sparse gradients"""
    return Bag(mode="sum", sparse=True)


@kind(mixes=True)
def positions():
    """a table of positions that torch.arange looks up, and one that is sliced"""
    return Layer(
        lambda m, x: x + m.table(torch.arange(len(x), device=x.device)) + m.sliced[: len(x)],
        table=nn.Embedding(64, WIDTH),
        sliced=nn.Parameter(torch.randn(64, WIDTH) * 0.1),
    )
