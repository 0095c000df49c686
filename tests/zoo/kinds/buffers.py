"""Buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.kind import COPIES, WIDTH, kind


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)


@kind()
class ConstantBuffer(Holds):
    """a buffer that nothing changes"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.shift)


@kind(**COPIES)
class RunningMean(Holds):
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
class RunningMeanInUse(Holds):
    """a buffer that the forward replaces and uses"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
        return self.inner(x - self.mean)


@kind(**COPIES)
class Counter(Holds):
    """a counter of calls"""

    counts = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(x)


@kind()
class GrowingBuffer(Holds):
    """a cache that the forward makes again where it is too small"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.cache) < len(x):
            self.cache = (torch.arange(len(x)) / 8)[:, None].expand(-1, WIDTH)
        return self.inner(x + self.cache[: len(x)])


@kind(**COPIES)
class QuantiserCodes(Holds):
    """a vector quantiser: codes in a buffer that follow the values, and an auxiliary gradient straight through"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        nearest = torch.cdist(h.detach().float(), self.codes).argmin(1)
        chosen = self.codes[nearest]
        if self.training:
            self.codes = self.codes.index_add(0, nearest, 0.05 * (h.detach().float() - chosen))
        return h + (chosen - h).detach()
