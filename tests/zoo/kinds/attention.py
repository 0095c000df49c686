"""Attention and transformer blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kind import WIDTH, kind

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
class CrossAttention(Seen):
    """nn.MultiheadAttention with other widths of keys, without weights returned, with dropout"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(DEPTH, 2, kdim=2, vdim=2, dropout=0.1, batch_first=True)

    def attend(self, x: Tensor) -> Tensor:
        return self.inner(x, x[..., :2], x[..., 2:], need_weights=False)[0]


@kind()
class EncoderLayer(Seen):
    """nn.TransformerEncoderLayer"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(DEPTH, 2, 8, dropout=0.1, batch_first=True)

    def attend(self, x: Tensor) -> Tensor:
        return self.inner(x)


@kind()
class DecoderLayer(Seen):
    """nn.TransformerDecoderLayer, norm first"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerDecoderLayer(DEPTH, 2, 8, dropout=0.0, batch_first=True, norm_first=True)

    def attend(self, x: Tensor) -> Tensor:
        return self.inner(x, x * 0.5)


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
class MaskedByBuffer(Seen):
    """attention with softmax by hand and a mask in a buffer"""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DEPTH, DEPTH) for _ in range(3))
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool(), persistent=False)

    def attend(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / DEPTH**0.5
        return scores.masked_fill(~self.mask, float("-inf")).softmax(-1) @ self.v(x)


@kind()
class Conv1DOfGPT2(nn.Module):
    """GPT-2's Conv1D: torch.addmm with the weight transposed"""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(x.shape)


@kind()
class Rotary(Seen):
    """rotary positions from buffers, grouped queries"""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(DEPTH, DEPTH), nn.Linear(DEPTH, 4)
        angles = torch.arange(LENGTH)[:, None] / torch.tensor([1.0])
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turn(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def attend(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 2)).transpose(1, 2)
        k, v = (t.unflatten(-1, (1, 2)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        q, k = self.turn(q).to(v.dtype), self.turn(k).to(v.dtype)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
