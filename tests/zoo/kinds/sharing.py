"""Shared weights and modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kind import WIDTH, Layer, kind

PLACES = "a weight at several places: its gradients are summed place by place, not microbatch by microbatch"


@kind()
def weight_twice():
    """one linear called twice in a layer"""
    return Layer(lambda m, x: m.inner(torch.tanh(m.inner(x))), inner=nn.Linear(WIDTH, WIDTH))


@kind()
def weight_in_two_ways():
    """one weight in F.linear and in a product with its transpose"""
    return Layer(
        lambda m, x: torch.tanh(F.linear(x, m.weight)) @ m.weight,
        weight=nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3),
    )


@kind()
class ModuleUnderTwoNames(nn.Module):
    """one module under two names in a layer"""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + torch.sigmoid(self.second(x))


@kind(bounded=PLACES)
def module_twice_in_a_row():
    """one module at two places, one after the other"""
    shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return [shared, shared]


@kind(bounded=PLACES, spans=True)
def module_at_two_places():
    """one module at two places of the model"""
    shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return [shared, shared]


@kind(bounded=PLACES, spans=True)
def module_at_three_places():
    """one module at three places of the model, one of them inside another layer"""
    shared = nn.Linear(WIDTH, WIDTH)
    return [shared, nn.Sequential(nn.Tanh(), shared), nn.Sequential(shared, nn.Tanh())]


@kind(bounded=PLACES, spans=True)
def tied_weight():
    """two linears with one weight"""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    return [first, nn.Sequential(nn.Tanh(), second)]


@kind(bounded=PLACES, spans=True)
def tied_table():
    """a table at the front whose weight is the head's"""
    from tests.zoo.kinds.tables import Looked

    table = nn.Embedding(11, WIDTH)
    head = nn.Linear(WIDTH, 11, bias=False)
    head.weight = table.weight
    return [Looked(table), nn.Sequential(head, nn.Tanh(), nn.Linear(11, WIDTH))]


@kind(bounded=PLACES, spans=True)
def tied_normalisation():
    """two layers with one LayerNorm, whose weights cannot wait in a split backward"""
    norm = nn.LayerNorm(WIDTH)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), norm), nn.Sequential(norm, nn.Linear(WIDTH, WIDTH))]
