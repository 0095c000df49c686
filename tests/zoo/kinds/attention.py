"""Attention and transformer blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kind import WIDTH, Layer, kind

LENGTH, DEPTH = 2, 4


class Seen(nn.Module):
    """Lets a row be seen as a sequence of LENGTH by DEPTH."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x.unflatten(1, (LENGTH, DEPTH))).flatten(1)

    def attend(self, x: Tensor) -> Tensor:
        raise AssertionError


@kind()
class MultiheadAttention(Seen):
    """nn.MultiheadAttention"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(DEPTH, 2, batch_first=True)

    def attend(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


@kind()
class EncoderLayer(Seen):
    """nn.TransformerEncoderLayer"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(DEPTH, 2, 8, dropout=0.1, batch_first=True)

    def attend(self, x: Tensor) -> Tensor:
        return self.inner(x)


@kind()
class HandWritten(Seen):
    """attention by hand, with scaled_dot_product_attention and one matrix for q, k and v"""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DEPTH, 3 * DEPTH, bias=False), nn.Linear(DEPTH, DEPTH)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@kind()
def conv1_dof_gpt2():
    """GPT-2's Conv1D: torch.addmm with the weight transposed"""
    return Layer(
        lambda m, x: torch.addmm(m.bias, x.view(-1, x.size(-1)), m.weight).view(x.shape),
        weight=nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2),
        bias=nn.Parameter(torch.zeros(WIDTH)),
    )
