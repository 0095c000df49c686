"""Mixed precision gives the bits of plain PyTorch: what autocast casts once, and what it casts at every use."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.runtime.pipeline import Pipeline

WIDTH, ROWS, M, RANKS = 16, 4, 6, 3


class Twice(nn.Module):
    """Uses one weight twice: autocast casts it once, so its two gradients are added in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Gates(nn.Module):
    """Uses its input twice: autocast casts it at every use, so its two gradients are added in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.one(x)) * torch.sigmoid(self.two(x)).float()


class Products(nn.Module):
    """Has operators that call others, which autocast casts: one kernel in torch, and one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x, x))


class OwnAutocast(nn.Module):
    """Enters autocast itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(x)
        return y.float()


LAYERS = {
    "weight used twice": (Twice, torch.bfloat16),
    "input used twice": (Gates, torch.bfloat16),
    "operator that calls others": (Products, torch.bfloat16),
    "autocast within the layer, weight used twice": (lambda: OwnAutocast(Twice()), None),
    "autocast within the layer, input used twice": (lambda: OwnAutocast(Gates()), None),
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS * M, WIDTH, generator=generator), torch.randn(
        ROWS * M, WIDTH, generator=generator
    )


def plain(net: nn.Module, step: int, dtype: torch.dtype | None) -> list[Tensor]:
    losses = []
    for x, y in zip(*(part.chunk(M) for part in batch(step)), strict=True):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = F.mse_loss(net(x), y)
        losses.append(loss.detach())
        (loss / M).backward()
    return losses


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", LAYERS)
def test_threads_give_the_bits_of_plain_pytorch(kind: str, schedule: str, recompute: str):
    make, dtype = LAYERS[kind]
    torch.manual_seed(0)
    net = nn.Sequential(*[make() for _ in range(2 * RANKS)])
    other = copy.deepcopy(net)
    optimizer, others = (torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, other))
    with Pipeline(
        net, F.mse_loss, microbatches=M, schedule=schedule, ranks=RANKS, autocast=dtype, recompute=recompute
    ) as pipe:
        for step in range(6):
            optimizer.zero_grad()
            others.zero_grad()
            losses = pipe.step(*batch(step)).losses
            assert torch.equal(losses, torch.stack(plain(other, step, dtype))), step
            for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad), (step, name)
            optimizer.step()
            others.step()
