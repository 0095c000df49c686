"""Hooks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.kind import WIDTH, Inner, kind

TIED = {"refused": r"is tied over several stages and has a hook", "when": "tied"}
"""Where a forward of the model's own calls a layer on several ranks."""


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@kind()
def forward_hooks():
    """forward hooks that change inputs and outputs"""
    net = mlp()
    net[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    net[2].register_forward_hook(lambda module, args, out: out + 0.1)
    net.register_forward_hook(lambda module, args, out: out * 0.9)
    return net


@kind()
def backward_hooks():
    """full backward hooks that change gradients"""
    net = mlp()
    net[0].register_full_backward_hook(
        lambda module, before, after: (before[0] * 0.5,) if before[0] is not None else None
    )
    net[2].register_full_backward_pre_hook(lambda module, after: (after[0] * 2,))
    return net


@kind()
def backward_hook_on_the_layer():
    """a full backward hook on the whole layer"""
    net = mlp()
    net.register_full_backward_hook(lambda module, before, after: None)
    return net


@kind(refused=r"layers of the stage before use that tensor", when="split")
class TensorHook(Inner):
    """a hook on an activation, and one on the layer's input"""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        h = self.inner(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
        return torch.tanh(h)


@kind(**TIED)
def parameter_hook():
    """a hook on a parameter that scales its gradient"""
    net = mlp()
    net[0].weight.register_hook(lambda grad: grad * 0.5)
    net[2].bias.register_hook(lambda grad: -grad)
    return net


@kind(**TIED)
def hook_that_reads_its_parameter():
    """a hook on a parameter that adds to its gradient what the parameter is"""
    net = mlp()
    weight = net[0].weight
    weight.register_hook(lambda grad: grad * (weight.detach() > 0) + 0.01 * weight.detach())
    return net


@kind(refused=r"buffers=|a hook that runs after its gradient was accumulated", when="copies")
class AccumulateHook(nn.Module):
    """a hook after a gradient was accumulated, which counts"""

    counts = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.inner.weight.register_post_accumulate_grad_hook(self.count)

    def count(self, weight: Tensor) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@kind()
class HookOnTheOutputOfALinear(nn.Module):
    """a hook on what a linear returns, that writes down gradients"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last: Tensor | None = None

    def keep(self, grad: Tensor) -> None:
        self.last = grad

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if h.requires_grad:
            h.register_hook(self.keep)
            h.retain_grad()
        return h.relu()


@kind()
class GradientReversal(Inner):
    """a gradient that a hook turns round"""

    def forward(self, x: Tensor) -> Tensor:
        side = self.inner(x)
        if side.requires_grad:
            side.register_hook(torch.neg)
        return x + side
