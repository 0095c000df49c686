"""What is not contiguous between stages has plain PyTorch's bits in processes, as in threads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.groups import run_cases

M, ROWS = 2, 3


class Transposed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()).transpose(-1, -2)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu().to(memory_format=torch.channels_last)


class Expanded(nn.Module):
    """Hands on a mean for every row, and every other row of a wider value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y.mean(-1, keepdim=True).expand(*x.shape), y[..., ::2]


class Joined(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        one, other = pair
        return self.inner(one) + self.inner(other) * other.sum(-1, keepdim=True)


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "channels last":
        return nn.Sequential(*[ChannelsLast() for _ in range(4)])
    if kind == "expanded":
        return nn.Sequential(Expanded(24), Joined(24), Expanded(24), Joined(24))
    return nn.Sequential(*[Transposed(24) for _ in range(4)])


def batch(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (M * ROWS, 8, 9, 9) if kind == "channels last" else (M * ROWS, 24, 24)
    x, y = (torch.randn(shape, generator=generator) for _ in range(2))
    return x, y


def pipelined(rank: int, kind: str, schedule: str) -> tuple[Tensor, dict[str, Tensor]]:
    torch.set_num_threads(1)
    with Pipeline(model(kind), F.mse_loss, microbatches=M, schedule=schedule, ranks=2, split=[1, 3]) as pipe:
        losses = pipe.step(*batch(kind)).losses
        return losses, {n: p.grad.clone() for n, p in pipe.named_parameters()}


def test_values_that_are_not_contiguous_have_the_bits_of_plain_pytorch(processes: LocalProcesses):
    cases = [("transposed", "1f1b"), ("channels last", "zb-h1"), ("expanded", "zb-h1")]
    for case, by_rank in zip(cases, run_cases(processes, 2, pipelined, cases), strict=True):
        net = model(case[0])
        losses, _ = plain.step(net, F.mse_loss, *batch(case[0]), M)
        for found, own in (pipelined(0, *case), *by_rank):
            assert torch.equal(found, losses), case
            assert all(torch.equal(grad, net.get_parameter(name).grad) for name, grad in own.items()), case
