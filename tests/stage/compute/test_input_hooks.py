"""Hooks on a layer's inputs get the full gradient, as in plain PyTorch, or are an error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.base.errors import PenstockError
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.named import Context, set_context
from tests.support.lanes import exhaustive

WIDTH = 6


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Balanced(Linear):
    """Uses its output in an auxiliary loss."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        penstock.add_loss(h.square().mean(), "balance")
        return h


class Hooked(Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return super().forward(x)


class Reshaped(nn.Module):
    """Returns another tensor with the same memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)


class Gives(Linear):
    gives = ("h",)

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        penstock.give("h", h)
        return h


class Takes(Linear):
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return super().forward(x + h)


X, Y = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(n)) for n in (0, 1))


def plain(layers: list[nn.Module]) -> list[Tensor]:
    """Return the gradients of the unsplit model, two microbatches accumulated."""
    layers = copy.deepcopy(layers)
    for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
        context = Context({}, {}, frozenset({"h"}))
        before = set_context(context)
        for layer in layers:
            x = layer(x, context.named["h"]) if isinstance(layer, Takes) else layer(x)
        set_context(before)
        loss = sum(context.losses.values(), F.mse_loss(x, y))
        (loss / 2).backward()
    return [p.grad for p in nn.ModuleList(layers).parameters()]


def split(layers: list[nn.Module], **options: object) -> list[Tensor]:
    """Return the gradients of a second step, with one layer a rank."""
    layers = copy.deepcopy(layers)
    settings = {"ranks": len(layers), "microbatches": 2, "timeout": 300, **options}
    with penstock.Pipeline(layers, F.mse_loss, **settings) as pipe:
        for _ in range(2):
            for p in pipe.parameters():
                p.grad = None
            pipe.step(X, Y)
    return [p.grad for p in nn.ModuleList(layers).parameters()]


@pytest.mark.parametrize(
    "options", [{}, {"recompute": "full", "ranks": 1}, *exhaustive({"recompute": "full"})], ids=str
)
@pytest.mark.parametrize(
    "layers",
    [[Linear(), Hooked(), Linear()], [Balanced(), Reshaped(), Hooked()], [Hooked(), Balanced(), Linear()]],
    ids=["alone", "of a view", "before"],
)
def test_a_hook_on_all_uses_of_an_input_is_called_as_in_plain_pytorch(layers, options):
    for ours, theirs in zip(split(layers, **options), plain(layers), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"recompute": "full", "ranks": 1}], ids=str)
@pytest.mark.parametrize(
    "layers",
    [[Balanced(), Hooked(), Linear()], [Balanced(), nn.Identity(), Hooked()]],
    ids=["a loss", "handed on"],
)
def test_a_hook_on_one_of_several_uses_is_refused(layers, options):
    with pytest.raises(PenstockError, match="a layer sets a hook on a tensor that it is given"):
        split(layers, **options)


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}], ids=str)
def test_a_hook_on_a_value_that_skips_its_stage_is_refused(options):
    with pytest.raises(PenstockError, match="a layer sets a hook on a tensor that it is given"):
        split([Gives(), Hooked(), Takes()], **options)


def test_a_hook_on_a_value_that_goes_on_in_the_same_message_sees_all_uses():
    layers = [Gives(), Hooked(), Takes()]
    for ours, theirs in zip(split(layers, recompute="full", ranks=1), plain(layers), strict=True):
        assert torch.equal(ours, theirs)


def in_a_process(rank: int) -> str:
    with pytest.raises(PenstockError) as info:
        split([Balanced(), Hooked()])
    return str(info.value)


@pytest.mark.slow
def test_processes_refuse_it_as_well(processes: LocalProcesses):
    for text in processes.run(2, in_a_process):
        assert "a layer sets a hook on a tensor that it is given" in text
