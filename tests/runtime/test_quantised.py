"""Linear layers that compute on values rounded to eight bits, as torchao's emulation of float8 does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

ROWS, WIDTH, MICROBATCHES = 8, 16, 4


class Rounded(torch.autograd.Function):
    """A value in float8 with a scale of the whole tensor; its gradient is passed on as it is, or rounded itself."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        scale = torch.finfo(dtype).max / value.abs().amax().clamp(min=1e-12)
        return (value * scale).to(dtype).to(value.dtype) / scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class RoundedGradient(torch.autograd.Function):
    """A value whose gradient is rounded to float8 with a larger range."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Rounded.forward(ctx, grad, torch.float8_e5m2)


class QuantisedLinear(nn.Linear):
    """A linear layer whose three matrix products are of rounded values."""

    def forward(self, input: Tensor) -> Tensor:
        x, weight = (Rounded.apply(one, torch.float8_e4m3fn) for one in (input, self.weight))
        output: Tensor = RoundedGradient.apply(F.linear(x, weight, self.bias))
        return output


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(QuantisedLinear(WIDTH, WIDTH), nn.GELU(), QuantisedLinear(WIDTH, WIDTH))
        for _ in range(4)
    ]
    return nn.Sequential(*blocks)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    return x, y


def plain_step(net: nn.Module) -> float:
    """Add up the gradients of the microbatches, each with a scale of its own, and return the loss."""
    total = 0.0
    for x, y in zip(*(one.chunk(MICROBATCHES) for one in batch()), strict=True):
        loss = F.mse_loss(net(x), y) / MICROBATCHES
        loss.backward()
        total += loss.item()
    return total


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v"])
def test_gradients_have_the_bits_of_plain_pytorch(schedule: str, recompute: str):
    ours = model()
    theirs = copy.deepcopy(ours)
    with penstock.Pipeline(
        ours, F.mse_loss, ranks=2, microbatches=MICROBATCHES, schedule=schedule, recompute=recompute
    ) as pipe:
        loss = pipe.step(*batch()).loss
    assert float(loss) == pytest.approx(plain_step(theirs), rel=1e-6)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_run_goes_on_from_a_checkpoint_at_another_layout(tmp_path: Path):
    for ranks, schedule in ((2, "zb-h1"), (4, "1f1b")):
        with penstock.Pipeline(
            model(), F.mse_loss, ranks=ranks, microbatches=MICROBATCHES, schedule=schedule
        ) as pipe:
            optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
            saved = penstock.Checkpoints(tmp_path, pipe, optimizer)
            assert (saved.load_newest() is None) == (ranks == 2)
            pipe.step(*batch())
            optimizer.step()
            saved.save()
            saved.close()
            found = pipe.state_dict()
    twice = model()
    adam = torch.optim.AdamW(twice.parameters(), lr=1e-2)
    for _ in range(2):
        plain_step(twice)
        adam.step()
        adam.zero_grad()
    for name, value in twice.state_dict().items():
        assert torch.equal(found[name], value), name
