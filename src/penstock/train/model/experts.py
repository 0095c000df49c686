"""Mixture of experts: feed-forwards without a capacity, and a router that chooses a few for each token (2101.03961).

Parameters and forward of `Experts` are those that transformers' experts have, so that what moves tokens to experts
elsewhere takes both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.huggingface.router_loss import RouterLoss
from penstock.train.config.sections import ModelConfig


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """SwiGLU experts, whose matrices lie in two stacks.

    The stack's length is the number of experts, so both stacks may be replaced by parts, with indices into the parts.

    Attributes:
        num_experts: number of experts.
        gate_up_proj: matrices of gate and up, float (experts, 2 * hidden, width); gate has the first `hidden` rows.
        down_proj: matrices of down, float (experts, width, hidden).
    """

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, hidden))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum of each token's experts, times their weights.

        Args:
            hidden_states: float (tokens, width); there may be no tokens.
            top_k_index: experts of each token, int64 (tokens, k).
            top_k_weights: weights of their outputs, float (tokens, k).

        Returns:
            float (tokens, width), of the dtype of `hidden_states`.
        """
        if not len(hidden_states):
            # One row of zeros: the backward of a product without rows fails in torch 2.13.
            given = (F.pad(x, (0, 0, 0, 1)) for x in (hidden_states, top_k_index, top_k_weights))
            return self.forward(*given)[:0]
        tokens, chosen = top_k_index.shape
        expert, order = top_k_index.flatten().sort(stable=True)
        every = torch.arange(self.gate_up_proj.shape[0], device=expert.device)
        ends = torch.searchsorted(expert, every, right=True, out_int32=True)
        # Rows are copied before they are sorted: then no two gradients are added in an order that only the device knows.
        rows = hidden_states.repeat_interleave(chosen, 0).index_select(0, order)
        gate, up = _products(rows, self.gate_up_proj, ends).chunk(2, -1)
        sorted_out = _products(F.silu(gate) * up, self.down_proj, ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        out = sorted_out.index_select(0, back).view(tokens, chosen, -1)
        return (out * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the products of rows, sorted by expert, with the transposed matrix of each row's expert."""
    device = rows.device.type
    if torch.is_autocast_enabled(device):  # which does not know these products
        dtype = torch.get_autocast_dtype(device)
        rows, matrices = rows.to(dtype), matrices.to(dtype)
    return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)


class Router(nn.Module):
    """A score of each expert for each token, and the experts with the highest ones; computed in float32.

    Scores are a softmax over all experts (2401.04088), or a sigmoid of each (2412.19437); the weights of those chosen are
    divided by their sum. With a rate of updates, experts are chosen by their scores plus a bias, which after each optimizer
    step grows by the rate for experts with fewer tokens than the mean, and shrinks for those with more (2408.15664).

    Attributes:
        bias: biases over the rate, int64 (experts), so that no dtype of the model rounds them.
        load: tokens of each expert since the last update, int64 (experts); see `ExpertBalance`.
    """

    bias: Tensor
    load: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.chosen = config.experts_per_token
        self.sigmoid = config.router == "sigmoid"
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        self.rate = config.bias_update_rate
        if self.rate:
            self.register_buffer("bias", torch.zeros(config.experts, dtype=torch.int64))
            self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64), persistent=False)

    def balance(self, load: Tensor) -> None:
        """Update the biases from the tokens of each expert, float (experts)."""
        self.bias += (load.mean() - load).sign().to(torch.int64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, indices and weights of the chosen experts, the last two of shape (tokens, k).

        The logits, (tokens, experts), are such that their softmax is in proportion to the scores.
        """
        weight = self.weight
        with torch.autocast(x.device.type, enabled=False):
            # A weight that is cast is not split into I and W.
            logits = F.linear(x.float(), weight if weight.dtype == torch.float32 else weight.float())
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        if self.rate:
            index = (scores.detach() + self.rate * self.bias).topk(self.chosen).indices
            best = scores.gather(-1, index)
            if self.training and torch.is_grad_enabled():
                self.load.scatter_add_(0, index.flatten(), torch.ones_like(index.flatten()))
        else:
            best, index = scores.topk(self.chosen)
        logits = F.logsigmoid(logits) if self.sigmoid else logits
        return logits, index, best / best.sum(-1, keepdim=True).clamp(min=1e-20)  # sigmoids may all be 0


class Mixture(nn.Module):
    """The experts that a router chooses, and a shared expert that all tokens take, if there is one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config.experts, config.width, config.expert_hidden or config.hidden)
        self.shared = FeedForward(config.width, config.shared_hidden) if config.shared_hidden else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        _, index, weights = self.router(rows)
        out: Tensor = self.experts(rows, index, weights).view_as(x)
        return out if self.shared is None else out + self.shared(x)


def balance_of(config: ModelConfig) -> RouterLoss:
    """Return the auxiliary loss of a model's routers."""
    return RouterLoss(
        Router, 0, config.layers, config.experts, config.experts_per_token, config.auxiliary_loss
    )
