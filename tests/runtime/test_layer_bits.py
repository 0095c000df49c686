"""Layers that a cut, a recompute, autocast or a split backward could change: they have the bits of plain PyTorch."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from tests.support import plain
from tests.support.lanes import exhaustive
from tests.support.plain import require_equal_gradients

WIDTH, ROWS, M = plain.WIDTH, 4, 4


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Twice(nn.Module):
    """Uses one weight twice: autocast casts it once, so its two gradients are added in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Gates(nn.Module):
    """Uses its input twice: autocast casts it at every use, so its two gradients are added in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = linear(), linear()

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
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return torch.tanh(self.inner(x))


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


class Quantised(nn.Linear):
    """A linear layer whose three matrix products are of rounded values, as in torchao's emulation of float8."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        x, weight = (Rounded.apply(one, torch.float8_e4m3fn) for one in (input, self.weight))
        return RoundedGradient.apply(F.linear(x, weight, self.bias))


class Attention(nn.TransformerEncoderLayer):
    """Autocast chooses the dtype of each of its operators; its rows are one sequence."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 16, 0.0)


KINDS = {
    "weight used twice": ([Twice, Twice], torch.bfloat16),
    "input used twice": ([Gates, Gates], torch.bfloat16),
    "operator that calls others": ([Products, Products], torch.bfloat16),
    "autocast within, weight used twice": ([lambda: OwnAutocast(Twice())] * 2, None),
    "autocast within, input used twice": ([lambda: OwnAutocast(Gates())] * 2, None),
    "other layout": ([linear, Fourier], None),
    "transposed": ([linear, Turned], None),
    "hook on the input": ([linear, Hooked], None),
    "layer of many operators": ([Attention], torch.bfloat16),
    "eight bits": ([Quantised, Quantised], None),
}
# Each kind once, and those with split backwards or recompute where these go another way for them.
CASES = [
    ("weight used twice", 3, "zb-h1", "none"),
    ("weight used twice", 3, "1f1b", "full"),
    ("input used twice", 3, "1f1b", "none"),
    ("input used twice", 3, "zb-h1", "none"),
    ("operator that calls others", 3, "1f1b", "none"),
    ("operator that calls others", 3, "zb-h1", "none"),
    ("autocast within, weight used twice", 3, "zb-h1", "full"),
    ("autocast within, input used twice", 3, "zb-h1", "none"),
    ("other layout", 3, "1f1b", "none"),
    ("transposed", 3, "1f1b", "full"),
    ("hook on the input", 1, "1f1b", "none"),
    ("hook on the input", 3, "1f1b", "full"),
    ("layer of many operators", 3, "zb-h1", "full"),
    ("eight bits", 3, "zb-v", "full"),
    ("eight bits", 3, "zb-h1", "none"),
]
REST = set(itertools.product(KINDS, (1, 3), ("1f1b", "zb-h1"), ("none", "full"))) - set(CASES)


@pytest.mark.parametrize(("kind", "ranks", "schedule", "recompute"), [*CASES, *exhaustive(*sorted(REST))])
def test_steps_have_the_bits_of_plain_pytorch(kind: str, ranks: int, schedule: str, recompute: str):
    parts, dtype = KINDS[kind]
    torch.manual_seed(0)
    net = nn.Sequential(*[make() for _ in range(3) for make in parts])
    other = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, other)]
    options: dict[str, Any] = {"schedule": schedule, "autocast": dtype, "recompute": recompute}
    # Their rows depend on each other: by attention, or by one scale for all of them.
    checks = kind not in ("layer of many operators", "eight bits")
    options["execution"] = ExecutionOptions(check_split=checks)
    with Pipeline(net, F.mse_loss, microbatches=M, ranks=ranks, **options) as pipe:
        for step in range(2):  # gradients accumulate
            found = pipe.step(*plain.batch(step, ROWS * M)).losses
            losses = []
            for x, y in zip(*(part.chunk(M) for part in plain.batch(step, ROWS * M)), strict=True):
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    losses.append(F.mse_loss(other(x), y))
                (losses[-1] / M).backward()
            assert torch.equal(found, torch.stack(losses).detach())
            require_equal_gradients(net, other)
            for optimizer in optimizers:
                optimizer.step()
