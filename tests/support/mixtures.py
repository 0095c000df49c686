"""A small model with a mixture of experts in each block, computed expert by expert in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, INNER, EXPERTS, CHOSEN, CLASSES = 8, 12, 4, 2, 16


class LoopedExperts(nn.Module):
    """Stacks of experts, called as those of transformers are; each runs on its tokens, one expert after the other."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * INNER, WIDTH) / WIDTH**0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, WIDTH, INNER) / INNER**0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            result = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out = out.index_add(0, token, result * top_k_weights[token, place, None])
        return out


class MixtureBlock(nn.Module):
    """A linear layer, and experts of which a router chooses; shapes (batch, sequence, width).

    Args:
        lone: whether the router sends all tokens to the same two experts, so that others get none (default False).
    """

    def __init__(self, experts: int = EXPERTS, lone: bool = False) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = LoopedExperts(experts)
        self.lone = lone

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        rows = self.norm(x).reshape(-1, WIDTH)
        logits = self.router(rows)
        if self.lone:
            logits = logits + torch.arange(logits.shape[1]) * 100.0
        weights, index = logits.softmax(-1).topk(CHOSEN)
        out: Tensor = x + self.experts(rows, index, weights).view_as(x)
        return out


def mixture(blocks: int = 4, lone: bool = False, experts: int = EXPERTS) -> nn.Sequential:
    """Return the model: tokens int64 (batch, sequence) → logits (batch, sequence, classes)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(CLASSES, WIDTH),
        *(MixtureBlock(experts, lone) for _ in range(blocks)),
        nn.Linear(WIDTH, CLASSES, bias=False),
    )


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(rows: int = 8, sequence: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, CLASSES, (rows, sequence), generator=generator)
    return x, torch.randint(0, CLASSES, (rows, sequence), generator=generator)
