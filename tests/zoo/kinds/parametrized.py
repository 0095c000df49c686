"""Parametrized weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from tests.zoo.kind import WIDTH, kind


@kind()
def weight_norm():
    """torch.nn.utils.parametrizations.weight_norm"""
    return parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


@kind(copies=False)
def spectral_norm():
    """torch.nn.utils.parametrizations.spectral_norm, whose forward changes buffers"""
    return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


@kind(copies=False)
def old_spectral_norm():
    """torch.nn.utils.spectral_norm, the older one by hooks"""
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


@kind()
def orthogonal():
    """torch.nn.utils.parametrizations.orthogonal"""
    return parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley")


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@kind()
def own_parametrization():
    """a parametrization of one's own"""
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@kind()
def pruned():
    """torch.nn.utils.prune: a mask over the weight"""
    layer = nn.Linear(WIDTH, WIDTH)
    prune.l1_unstructured(layer, "weight", amount=0.4)
    return layer


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) * 0.3)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


@kind()
def lora():
    """LoRA by hand beside a frozen linear"""
    return Adapted(nn.Linear(WIDTH, WIDTH))


@kind()
class LoraInTheWeight(nn.Module):
    """LoRA added to the frozen weight itself"""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) * 0.3)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.up @ self.down, self.base.bias)


@kind()
class Standardised(nn.Module):
    """a convolution with a standardised weight"""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight
        weight = (weight - weight.mean((1, 2), keepdim=True)) / (weight.std((1, 2), keepdim=True) + 1e-3)
        return x + F.conv1d(x.unflatten(1, (2, 4)), weight, self.conv.bias, padding=1).flatten(1)


@kind()
class Quantised(nn.Module):
    """a weight rounded with a straight-through gradient"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        rounded = weight + ((weight * 8).round() / 8 - weight).detach()
        return F.linear(x, rounded, self.inner.bias)
