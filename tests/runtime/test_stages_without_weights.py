"""Stages, and whole models, that have no weights; and inputs that are tuples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.runtime.pipeline import Pipeline
from tests.support import plain
from tests.support.lanes import slow

WIDTH, MICROBATCHES = plain.WIDTH, 4


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(2 * x)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["zb-h1", *slow("1f1b", "gpipe")])
@pytest.mark.parametrize("weighty", [(0,), (1,), (3,), (0, 3), ()])
def test_stages_without_weights_are_as_in_plain_pytorch(
    weighty: tuple[int, ...], schedule: str, recompute: str
):
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) if k in weighty else Doubled() for k in range(4)])

    ours, theirs = model(), model()
    x, y = plain.batch(0, 2 * MICROBATCHES)
    losses, slopes = plain.step(theirs, F.mse_loss, x, y, MICROBATCHES)
    with Pipeline(
        ours, F.mse_loss, microbatches=MICROBATCHES, ranks=4, schedule=schedule, recompute=recompute
    ) as pipe:
        result = pipe.step(x, y, input_grads=True)
        assert torch.equal(result.losses, losses)
        assert all(torch.equal(a, b) for a, b in zip(result.input_grads, slopes, strict=True))
        plain.require_equal_gradients(ours, theirs)


class Dropouts(nn.Module):
    """Drops a few elements many times over."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(50):
            x = F.dropout(x, 0.01, self.training)
        return x


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_backward_drops_what_its_forward_dropped(recompute: str):
    x = torch.ones(8, 10)
    with Pipeline(
        [Dropouts(), Dropouts()],
        lambda out, y: out.sum(),
        microbatches=8,
        ranks=2,
        recompute=recompute,
        reduction="sum",
    ) as pipe:
        result = pipe.step(x, x, outputs=True, input_grads=True)
    for out, slope in zip(result.outputs, result.input_grads, strict=True):
        assert 0 < out.count_nonzero() < out.numel()
        # Of ones, each element of the output is the product of its masks, and so is its gradient.
        torch.testing.assert_close(slope, out)


class Each(nn.Module):
    """A linear for each value of a tuple."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(values))

    def forward(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(inner(value) for inner, value in zip(self.inner, values, strict=True))


@pytest.mark.parametrize("values", [1, 2])
def test_a_tuple_goes_in_and_comes_out_and_each_of_its_values_gets_a_gradient(values: int):
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Each(values) for _ in range(2)])

    def loss_fn(out: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return sum((F.mse_loss(value, y) for value in out), torch.zeros(()))

    ours, theirs = model(), model()
    x, y = plain.batch(0, 2 * MICROBATCHES)
    given = tuple(x + k for k in range(values))
    leaves = tuple(value.clone().requires_grad_() for value in given)
    parts: list[tuple[Any, ...]] = list(zip(*(leaf.chunk(MICROBATCHES) for leaf in leaves), strict=True))
    for part, target in zip(parts, y.chunk(MICROBATCHES), strict=True):
        (loss_fn(theirs(part), target) / MICROBATCHES).backward()
    with Pipeline(ours, loss_fn, microbatches=MICROBATCHES, ranks=2, schedule="zb-h1") as pipe:
        result = pipe.step(given, y, outputs=True, input_grads=True)
        assert all(isinstance(out, tuple) and len(out) == values for out in result.outputs)
        for k, leaf in enumerate(leaves):
            # Of a single tensor, the gradient stands alone.
            ours_of = [slopes[k] if values > 1 else slopes for slopes in result.input_grads]
            assert torch.equal(torch.cat(ours_of), leaf.grad)
        plain.require_equal_gradients(ours, theirs)
