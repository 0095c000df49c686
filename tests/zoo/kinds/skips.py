"""Skip connections and auxiliary losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import penstock
from tests.zoo.kind import WIDTH, Inner, kind


class Down(Inner):
    gives = ("detail",)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        penstock.give("detail", x * 2)
        return torch.tanh(x)


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, detail: Tensor) -> Tensor:
        return self.inner(torch.cat([x, detail.to(x.dtype)], 1))


@kind(spans=True)
def u_net_skip():
    """a U-Net's skip by penstock.give"""
    return [Down(), Up()]


class GivesMuch(nn.Module):
    gives = ("much",)

    def forward(self, x: Tensor) -> Tensor:
        penstock.give(
            "much", {"value": torch.sin(x), "ids": torch.arange(len(x)), "none": None, "deep": (2, "text")}
        )
        return x


class TakesMuch(Inner):
    def forward(self, x: Tensor, much: dict) -> Tensor:
        return self.inner(x) + much["value"] * much["deep"][0] + much["ids"][:, None]


@kind(spans=True, mixes=True)
def skip_of_many_things():
    """a dictionary given past other layers"""
    return [GivesMuch(), TakesMuch()]


class GivesWithoutGradient(nn.Module):
    gives = ("mask",)

    def forward(self, x: Tensor) -> Tensor:
        penstock.give("mask", x.detach() > 0)
        return x * 1.5


class Masks(Inner):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.inner(x)
        return x if mask is None else x * mask


@kind(spans=True)
def skip_without_gradient():
    """a mask given past other layers, taken twice"""
    return [GivesWithoutGradient(), Masks(), Masks()]


class Balanced(Inner):
    """Adds a loss of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        penstock.add_loss(0.1 * h.float().square().mean(), "balance")
        return h


@kind()
def auxiliary_loss():
    """penstock.add_loss in a layer"""
    return Balanced()


@kind(spans=True)
def auxiliary_losses():
    """penstock.add_loss in two layers, under one name"""
    return [Balanced(), Balanced()]
