"""Buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.zoo.kind import COPIES, WIDTH, Inner, kind


@kind()
class ConstantBuffer(Inner):
    """a buffer that nothing changes"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.shift)


@kind(**COPIES)
class RunningMean(Inner):
    """a buffer that the forward changes in place and does not use in training"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().float().mean(0), 0.1)
            return self.inner(x)
        return self.inner(x - self.mean)


@kind(**COPIES)
class RunningMeanInUse(Inner):
    """a buffer that the forward replaces and uses"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
        return self.inner(x - self.mean)


@kind(**COPIES)
class Counter(Inner):
    """a counter of calls"""

    counts = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(x)


@kind(mixes=True)
class GrowingBuffer(Inner):
    """a cache that the forward makes again where it is too small"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.cache) < len(x):
            self.cache = (torch.arange(len(x)) / 8)[:, None].expand(-1, WIDTH)
        return self.inner(x + self.cache[: len(x)])
