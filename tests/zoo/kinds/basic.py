"""Basic layers of torch.nn."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kind import WIDTH, kind


@kind()
def linear():
    """nn.Linear"""
    return nn.Linear(WIDTH, WIDTH)


@kind()
def linear_without_bias():
    """nn.Linear without a bias"""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())


@kind()
def mlp():
    """two linears with an activation between them"""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


@kind()
def layer_norm():
    """nn.LayerNorm"""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


@kind()
def rms_norm():
    """nn.RMSNorm"""
    return nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


@kind()
def no_parameters():
    """activations only"""
    return nn.Sequential(nn.Softplus(), nn.Hardtanh())


@kind()
def identity():
    """nn.Identity"""
    return nn.Identity()


@kind()
class ListOfModules(nn.Module):
    """nn.ModuleList and nn.ModuleDict inside a layer"""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.named = nn.ModuleDict({"gate": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.many:
            x = x + torch.tanh(inner(x))
        return x * torch.sigmoid(self.named["gate"](x))


@kind()
class ListOfParameters(nn.Module):
    """nn.ParameterList and nn.ParameterDict"""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(2)])
        self.named = nn.ParameterDict({"shift": torch.randn(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.many:
            x = torch.tanh(F.linear(x, weight))
        return x + self.named["shift"]


@kind(refused=r"(?i)lazy", optimizers=("sgd", "momentum", "adam", "adamw"))
def lazy_linear():
    """nn.LazyLinear, which has no shape yet"""
    return nn.LazyLinear(WIDTH)


@kind()
def dropout():
    """nn.Dropout"""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))


@kind()
class Noise(nn.Module):
    """torch.randn_like and torch.bernoulli in the forward"""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * torch.randn_like(x)
        return x * torch.bernoulli(torch.full_like(x, 0.8))
