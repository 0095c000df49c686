"""Parametrized weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

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
