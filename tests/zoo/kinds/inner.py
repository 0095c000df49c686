"""Autograd and torch.func inside a forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from tests.zoo.kind import RECOMPUTE, WIDTH, Inner, Layer, kind


@kind(**RECOMPUTE)
class GradientPenalty(nn.Module):
    """torch.autograd.grad with create_graph in the forward, as a loss"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            probe = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(probe).float().square().sum(), probe, create_graph=True)
        penstock.add_loss(0.1 * slope.square().mean(), "penalty")
        return self.inner(x)


@kind(**RECOMPUTE)
class Forces(nn.Module):
    """an energy model: the layer returns the slope of an energy"""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(at).sum(), at, create_graph=True)
        return x - 0.5 * slope


@kind(mixes=True, **RECOMPUTE)
class InnerSteps(nn.Module):
    """gradient steps on a weight inside the forward, as in meta-learning"""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = F.linear(x, self.weight).square().mean()
            (slope,) = torch.autograd.grad(loss, self.weight, create_graph=True)
        return F.linear(x, self.weight - 0.1 * slope)


@kind(**RECOMPUTE)
class InnerGradientWithoutGraph(nn.Module):
    """torch.autograd.grad without create_graph, of a module whose weights get no gradient"""

    def __init__(self) -> None:
        super().__init__()
        self.guide, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            probe = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.guide(probe).float().square().sum(), probe)
        return self.inner(x - 0.1 * slope)


@kind(**RECOMPUTE)
class FuncGrad(nn.Module):
    """torch.func.grad of a module, mapped over rows"""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda row: torch.tanh(self.energy(row)).sum()))
        return x + slope(x)


@kind()
def func_vmap():
    """torch.func.vmap over a linear"""
    return Layer(
        lambda m, x: torch.func.vmap(lambda row: torch.tanh(m.inner(row)))(x), inner=nn.Linear(WIDTH, WIDTH)
    )


@kind(refused=r"use recompute='none'|do not work in ranks that are threads", when="recompute or threads")
class FuncJacobian(Inner):
    """torch.func.jvp and jacrev"""

    def forward(self, x: Tensor) -> Tensor:
        out, along = torch.func.jvp(lambda v: torch.tanh(self.inner(v)), (x,), (torch.ones_like(x),))
        return out + 0.1 * along


@kind()
class FunctionalCall(nn.Module):
    """torch.func.functional_call with weights computed from others"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: p * self.scale if p.dim() == 2 else p for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (x,))
