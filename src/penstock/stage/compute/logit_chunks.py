"""The loss and the gradients of a linear head, by chunks of tokens.

With tensor parallelism each rank has a shard of the vocabulary, and computes the chunk's logits and gradients for it alone.
Of other shards, a rank gets three numbers a token: the logarithm of their softmax's denominator, the target's logit, and the
mean logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from penstock.stage.compute.postponed_logits import Map, Shard


def wide(logits: Tensor) -> torch.dtype:
    """Return the dtype that a loss is computed in."""
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def _same(tensor: Tensor) -> Tensor:
    return tensor


class Work(NamedTuple):
    target: Tensor
    counts: Tensor
    maps: Sequence[Map]
    trains: bool
    shard: Shard | None
    chunks: int
    label_smoothing: float
    z_loss: float


class Chunks(torch.autograd.Function):
    """The loss, and its gradients in the same pass over the chunks, which the backward only scales."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: Work) -> Tensor:
        for_hidden, for_weight, for_bias = (work.trains and needed for needed in ctx.needs_input_grad[:3])
        dtype = wide(weight)
        total = hidden.new_zeros((), dtype=dtype)
        number = work.counts.sum().clamp(min=1)
        hidden_grad = torch.empty_like(hidden) if for_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=dtype) if for_weight else None
        bias_grad = torch.zeros_like(bias, dtype=dtype) if for_bias and bias is not None else None
        length = max(1, -(-len(hidden) // work.chunks))
        for start in range(0, len(hidden), length):
            rows = slice(start, start + length)
            loss, grad = _loss_and_grad(F.linear(hidden[rows], weight, bias), rows, work)
            total += loss
            # Tokens that do not count are left out of the small operand of each product, not of the logits' gradient.
            counts = work.counts[rows].unsqueeze(-1).to(grad.dtype)
            if hidden_grad is not None:
                hidden_grad[rows] = (grad @ weight.to(grad.dtype)) * counts
            x = hidden[rows].to(grad.dtype) * counts
            if weight_grad is not None and grad.dtype is dtype:
                weight_grad.addmm_(grad.t(), x)
            elif weight_grad is not None and grad.is_cuda:  # the product adds in fp32 by itself
                torch.addmm(weight_grad, grad.t(), x, out_dtype=dtype, out=weight_grad)
            elif weight_grad is not None:
                weight_grad += grad.t() @ x
            if bias_grad is not None:
                bias_grad += (grad.t() @ counts).squeeze(-1)
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        ctx.number = number
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total / number

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In place, since a second gradient of the weight's size would cost much of what the chunks save. A second backward
        # is refused by autograd, which sees that saved tensors were modified.
        factor = grad / ctx.number
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if one is None else one.mul_(factor).to(dtype) for one, dtype in saved), None


def _loss_and_grad(raw: Tensor, rows: slice, work: Work) -> tuple[Tensor, Tensor]:
    """Return the sum of a chunk's losses, and the gradient of each token's own loss by its logits before the maps.

    The gradient is p (1 + 2 z lse) - (1 - s) [target] - s / vocabulary, with the softmax p, the logarithm lse of its
    denominator, the label smoothing s and the weight z of the z-loss. With a shard of the vocabulary, it is its gradient.
    """
    counts, maps, smoothing = work.counts[rows], work.maps, work.label_smoothing
    classes = raw.shape[-1] if work.shard is None else work.shard.classes
    raw = raw.detach().requires_grad_(bool(maps))
    # Hooks of a recompute, which drop what is saved, are not for this graph: it ends in this call.
    with torch.enable_grad(), saved_tensors_hooks(_same, _same):
        mapped = raw
        for function in maps:
            mapped = function(mapped)
    found = logs_of(mapped.detach(), work.target[rows], counts, work.shard, with_mean=bool(smoothing))
    lse, of_target = found.lse, found.of_target
    loss = -(1 - smoothing) * of_target
    if smoothing:
        loss -= smoothing * found.mean
    if work.z_loss:
        loss += work.z_loss * lse.square()
    grad = found.softmax.exp_()
    if work.z_loss:
        grad *= (1 + 2 * work.z_loss * lse).unsqueeze(-1)
    if smoothing:
        grad -= smoothing / classes
    at_target = torch.full_like(lse, smoothing - 1)
    if work.shard is not None:
        at_target = at_target * found.here
    grad.scatter_add_(-1, found.chosen, at_target.unsqueeze(-1))
    if maps:
        (grad,) = torch.autograd.grad(mapped, raw, grad.to(mapped.dtype))
    # A token that does not count may have a loss that is not finite; 0 times it would be NaN.
    return torch.where(counts, loss, 0).sum(), grad.to(raw.dtype)


class _Logs(NamedTuple):
    """Logarithms of probabilities by token.

    Attributes:
        softmax: of each class of the rank's part of the vocabulary.
        of_target, lse, mean: of the target, of the softmax's denominator, and the mean over the classes (0 unless asked).
        chosen, here: index of the target in the part, and whether it is there.
    """

    softmax: Tensor
    of_target: Tensor
    lse: Tensor
    mean: Tensor
    chosen: Tensor
    here: Tensor


def logs_of(
    logits: Tensor, target: Tensor, counts: Tensor, shard: Shard | None, with_mean: bool = False
) -> _Logs:
    here = counts
    if shard is not None:
        target = target - shard.start
        here = counts & (target >= 0) & (target < logits.shape[-1])
    chosen = torch.where(here, target, 0).unsqueeze(-1)
    logs = F.log_softmax(logits, -1, dtype=wide(logits))
    of_target = logs.gather(-1, chosen).squeeze(-1)
    of_target_logit = logits.gather(-1, chosen).squeeze(-1).to(logs.dtype)
    lse = of_target_logit - of_target
    mean = logs.mean(-1) if with_mean else torch.zeros_like(lse)
    if shard is not None:
        own = lse
        lse, of_target, mean = _over_shards(
            shard.group, lse, torch.where(here, of_target_logit, 0), mean + lse
        )
        logs += (own - lse).unsqueeze(-1)
    return _Logs(logs, of_target, lse, mean, chosen, here)


def _over_shards(
    group: dist.ProcessGroup, lse: Tensor, of_target: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's logarithm of the whole denominator, and the logarithms of its target's and its mean probability.

    Args:
        group: processes with equal parts of the vocabulary.
        lse, of_target, mean: of the rank's part, the logarithm of the denominator, the target's logit (0 if it is in
            another part) and the mean logit.
    """
    own = torch.stack([lse, of_target, mean])
    each = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(each, own, group=group)
    parts = torch.stack(each)
    lse = parts[:, 0].logsumexp(0)
    return lse, parts[:, 1].sum(0) - lse, parts[:, 2].mean(0) - lse
