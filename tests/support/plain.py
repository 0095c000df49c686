"""Plain PyTorch, the oracle: gradient accumulation over the same microbatches on the unsplit model."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 12


def model(layers: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(layers)]
    )


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(size, WIDTH, generator=generator), torch.randn(size, WIDTH, generator=generator)


def step(net: nn.Module, loss_fn, x, y, microbatches: int):
    """Returns (losses, input gradients); gradients accumulate in the model."""
    losses, grads = [], []
    for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        leaf = a.clone().requires_grad_(a.is_floating_point())
        loss = loss_fn(net(leaf), b)
        (loss / microbatches).backward()
        losses.append(loss.detach())
        grads.append(leaf.grad)
    return torch.stack(losses), grads


def require_equal_gradients(ours: nn.Module, theirs: nn.Module, exactly: bool = True) -> None:
    """Bit for bit, or but for the order of a sum; None where the other's is."""
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if exactly:
            assert one.grad is None or torch.equal(one.grad, other.grad), name
        else:
            # An element may be small beside what was added up for it, so errors are measured by the largest.
            most = float(other.grad.abs().max())
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=max(1e-7, 1e-6 * most), msg=name)


def train(layers: int, microbatches: int, steps: int = 3):
    """Losses of every step, final weights and last gradients of the unsplit model."""
    net = model(layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    history = []
    for n in range(steps):
        optimizer.zero_grad()
        x, y = batch(n, 2 * microbatches)
        losses, _ = step(net, nn.functional.mse_loss, x, y, microbatches)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        history.append(losses)
    return (
        history,
        {n: p.detach().clone() for n, p in net.named_parameters()},
        {n: p.grad.clone() for n, p in net.named_parameters()},
    )
