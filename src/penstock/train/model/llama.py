"""A Llama-style decoder as a list of layers: embedding, blocks, head.

RMSNorm before each half of a block (1910.07467), rotary positions (2104.09864), grouped-query attention (2305.13245)
and a SwiGLU feed-forward (2002.05202), or a mixture of them; no biases, no dropout, embedding and head not tied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.parallel.context.attention import current_part
from penstock.stage.layers import Layer, Role
from penstock.stage.rng.initial import build_with_weights
from penstock.train.config.sections import ModelConfig
from penstock.train.model.experts import FeedForward, Mixture, balance_of


def layers(config: ModelConfig, seed: int = 0) -> list[Layer]:
    """Return the model as layers that build themselves: ``embedding``, ``blocks.0`` ..., ``head``.

    The input is tokens, int64 of shape (batch, sequence); the output logits, float32 of shape (batch, sequence, vocabulary).
    """

    def layer(name: str, build: Callable[[], nn.Module], role: Role) -> Layer:
        fill = partial(_fill, additions=config.layers * (3 if config.shared_hidden else 2))
        return Layer(name, partial(build_with_weights, build, name, seed, fill), role)

    block, head = (BalancedBlock, BalancedHead) if config.auxiliary_loss else (LlamaBlock, Head)
    return [
        layer("embedding", partial(nn.Embedding, config.vocabulary, config.width), "embedding"),
        *(layer(f"blocks.{n}", partial(block, config), "block") for n in range(config.layers)),
        layer("head", partial(head, config), "head"),
    ]


def next_token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats; logits (batch, sequence, vocabulary), target int64 (batch, sequence).

    It is computed in float32.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator, *, additions: int) -> None:
    """Fill norms with ones and matrices with normal numbers of variance 1/columns.

    Matrices that add to the residual stream get less: two or three additions a block would otherwise let the stream's
    variance grow with depth (GPT-2's rule).
    """
    if parameter.ndim < 2:
        parameter.fill_(1.0)
        return
    spread = 1.0 / math.sqrt(parameter.shape[-1])
    # All matrices together add the variance to the stream that one would.
    if name in _ADDED:
        spread /= math.sqrt(additions)
    parameter.normal_(0.0, spread, generator=generator)


_DOWN = ("down.weight", "experts.down_proj", "shared.down.weight")
_ADDED = {"attention.output.weight", *(f"feed_forward.{name}" for name in _DOWN)}


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each added to the residual stream of shape (batch, sequence, width).

    The forward also takes position_ids, int64 (batch, sequence), which restart at 0 where another document begins; by
    default a row is one document.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.norm_epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, config.norm_epsilon)
        self.feed_forward = Mixture(config) if config.experts else FeedForward(config.width, config.hidden)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        # Sequence parallelism knows attention by its one input.
        named = {} if position_ids is None else {"position_ids": position_ids}
        x = x + self.attention(self.attention_norm(x), **named)
        out: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class BalancedBlock(LlamaBlock):
    """A block that passes on the sums of `RouterLoss` beside the residual stream, with its own router's added."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.balance = balance_of(config)

    def forward(self, x: Any, position_ids: torch.Tensor | None = None) -> Any:
        x, count, probability = x if isinstance(x, tuple) else (x, *self.balance.zeros(x.device))
        with self.balance.logits_of(self) as logits:
            x = super().forward(x, position_ids)
        return x, *self.balance.added(count, probability, logits, None)


class Attention(nn.Module):
    """Causal self-attention within documents; every ``heads / kv_heads`` query heads share a key and a value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        self.rotary_base = config.rotary_base
        self.query = nn.Linear(config.width, config.heads * self.head_size, bias=False)
        self.key = nn.Linear(config.width, config.kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(config.width, config.kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(config.heads * self.head_size, config.width, bias=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        batch, sequence, _ = x.shape
        by_head = (batch, sequence, -1, self.head_size)
        part = current_part()
        length = sequence if part is None else part.whole_length(sequence)
        turn = rotary_table(length, self.head_size, self.rotary_base, x.device)
        mask = None
        if part is not None:
            positions = part.positions(sequence, x.device)
            turn = (turn[0][positions], turn[1][positions])
        if position_ids is not None:
            turn = (turn[0][position_ids], turn[1][position_ids])
            mask = document_mask(position_ids)
        query = rotate(self.query(x).view(by_head), *turn).transpose(1, 2)
        key = rotate(self.key(x).view(by_head), *turn).transpose(1, 2)
        value = self.value(x).view(by_head).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        out: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return out


class Head(nn.Module):
    """The last norm and the projection to logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, config.norm_epsilon)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.output(self.norm(x))
        return out


class BalancedHead(Head):
    """A head that adds the auxiliary loss of the routers to the model's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.balance = balance_of(config)

    def forward(self, value: Any) -> torch.Tensor:
        x, count, probability = value
        self.balance.add_to_loss(count, probability, x.shape[:-1].numel(), None)
        return super().forward(x)


def document_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """Return which earlier tokens of its own document each token attends to; bool (batch, 1, sequence, sequence)."""
    document = (position_ids == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


def rotary_table(
    sequence: int, head_size: int, base: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of position times frequency, each float32 of shape (sequence, 1, head_size / 2)."""
    # Few cached tables for the many lengths of a text that is being generated.
    rounded = 1 << (sequence - 1).bit_length()
    cosine, sine = _rotary_table(rounded, head_size, base, device)
    return cosine[:sequence], sine[:sequence]


@cache
def _rotary_table(
    sequence: int, head_size: int, base: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):  # training must be able to use a table made by generating
        # In float64: with float32 angles the cosines of position 8,000 would be off by 3e-4.
        frequency = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        angle = torch.arange(sequence, dtype=torch.float64)[:, None, None] * frequency
        return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + head_size / 2) of x, shape (batch, sequence, heads, head_size), by its angle.

    The turn is computed in float32; the result has x's dtype.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1).to(x.dtype)
