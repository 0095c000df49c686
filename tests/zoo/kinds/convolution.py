"""Convolutions and normalization over channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kind import COPIES, WIDTH, Layer, kind


class Shaped(nn.Module):
    """Runs `inner` on the row seen in another shape, and adds what comes out to the row."""

    def __init__(self, shape: tuple[int, ...], *inner: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x.unflatten(1, self.shape)).flatten(1)[:, :WIDTH])


@kind()
def conv1d():
    """nn.Conv1d"""
    return Shaped((2, 4), nn.Conv1d(2, 2, 3, padding=1))


@kind()
def conv2d():
    """nn.Conv2d with stride, and one without bias"""
    return Shaped((2, 2, 2), nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Conv2d(4, 8, 1, bias=False))


@kind()
def depthwise():
    """a depthwise convolution and a pointwise one"""
    return Shaped((4, 2), nn.Conv1d(4, 4, 3, padding=1, groups=4), nn.Conv1d(4, 4, 1))


@kind()
def conv_same_padding():
    """padding="same" with dilation"""
    return Shaped((2, 4), nn.Conv1d(2, 2, 3, padding="same", dilation=2))


@kind()
def transposed_conv():
    """nn.ConvTranspose1d and nn.ConvTranspose2d"""
    return nn.Sequential(
        Shaped((2, 4), nn.ConvTranspose1d(2, 2, 3, padding=1)),
        Shaped((2, 2, 2), nn.ConvTranspose2d(2, 2, 1)),
    )


@kind(mixes=True)
def conv_of_one_sample():
    """a convolution of rows as one sample without a batch dimension"""
    return Layer(lambda m, x: x + torch.tanh(m.conv(x.t()).t()), conv=nn.Conv1d(WIDTH, WIDTH, 3, padding=1))


@kind(mixes=True)
class ConvOfWeightsFromInput(nn.Module):
    """a convolution whose kernel another layer computes"""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.make(x.mean(0)).view(1, 1, 3)
        return x + F.conv1d(x[:, None], kernel.to(x.dtype), padding=1)[:, 0]


@kind(rows=2)
def batch_norm():
    """nn.BatchNorm1d"""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


@kind(rows=2)
def batch_norm_cumulative():
    """nn.BatchNorm1d with momentum=None and without weights"""
    return nn.BatchNorm1d(WIDTH, momentum=None, affine=False)


@kind(rows=2, mixes=True)
def batch_norm_untracked():
    """nn.BatchNorm1d that keeps no statistics"""
    return nn.BatchNorm1d(WIDTH, track_running_stats=False)


@kind(**COPIES)
def instance_norm():
    """nn.InstanceNorm1d with statistics"""
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten()
    )


@kind(rows=2)
class ResNetBlock(nn.Module):
    """a ResNet block: convolutions, BatchNorm, ReLU in place, a skip"""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(2, 2, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        image = x.unflatten(1, (2, 2, 2))
        out = self.relu(self.norm_one(self.one(image)))
        out = self.norm_two(self.two(out))
        out += image
        return self.relu(out).flatten(1)
