"""What a cut between layers must not change: the layout of gradients, and hooks on what a layer is given."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.runtime.pipeline import Pipeline

WIDTH, ROWS, M = 8, 8, 4


class Fourier(nn.Module):
    """A filter over frequencies, which hands back a gradient laid out otherwise than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)


class Turned(nn.Module):
    """The same by a transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.t()).t()


class Hooked(nn.Module):
    """Changes the gradient of its input by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", [Fourier, Turned, Hooked])
def test_gradients_have_the_bits_of_plain_pytorch(kind: type[nn.Module], ranks: int, recompute: str):
    torch.manual_seed(0)
    net = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), kind())])
    other = copy.deepcopy(net)
    x, y = torch.randn(ROWS * M, WIDTH), torch.randn(ROWS * M, WIDTH)
    with Pipeline(net, F.mse_loss, microbatches=M, ranks=ranks, recompute=recompute) as pipe:
        for _ in range(2):
            pipe.step(x, y)
    for _ in range(2):
        for a, b in zip(x.chunk(M), y.chunk(M), strict=True):
            (F.mse_loss(other(a), b) / M).backward()
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
