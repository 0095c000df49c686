"""Frozen and unused weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.kind import WIDTH, Layer, kind


@kind()
def frozen_layer():
    """a layer without any gradient"""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)


@kind()
def frozen_weight():
    """a linear whose weight is frozen and whose bias is not"""
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.requires_grad_(False)
    return layer


@kind()
def frozen_bias():
    """a linear whose bias is frozen and whose weight is not"""
    layer = nn.Linear(WIDTH, WIDTH)
    layer.bias.requires_grad_(False)
    return layer


@kind()
def never_used():
    """a weight that no forward uses"""
    return Layer(lambda m, x: m.inner(x), inner=nn.Linear(WIDTH, WIDTH), spare=nn.Linear(WIDTH, WIDTH))


@kind(mixes=True)
class Experts(nn.Module):
    """experts: which weights are used depends on the microbatch's values"""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        which = int((x.detach().float().sum() * 50).long() % 4)
        return x + torch.tanh(self.experts[which](x))


@kind()
class RoutedRows(nn.Module):
    """experts by row, with index_add"""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weight, which = self.route(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows = (which == n).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, (expert(x[rows]) * weight[rows, None]).to(out.dtype))
        return x + out


@kind()
class NoGradInside(nn.Module):
    """a branch under torch.no_grad, and one under torch.enable_grad inside of it"""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.target = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            side = self.target(x)
        return self.inner(x) + torch.sigmoid(side)


@kind()
def cuts_the_graph():
    """a layer whose output is detached: the layers before it get no gradient"""
    return Layer(lambda m, x: m.inner(x.detach()), inner=nn.Linear(WIDTH, WIDTH))


@kind()
def cuts_the_graph_behind():
    """a layer that returns a detached value: its own weights get no gradient either"""
    return Layer(lambda m, x: m.inner(x).detach(), inner=nn.Linear(WIDTH, WIDTH))
