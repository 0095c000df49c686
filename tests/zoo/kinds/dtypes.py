"""Other dtypes than float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.kind import WIDTH, Inner, Layer, kind


@kind(autocast=False)
def double_layer():
    """a layer in float64"""
    return Layer(lambda m, x: m.inner(x.double()).to(x.dtype), inner=nn.Linear(WIDTH, WIDTH).double())


@kind(autocast=False)
def double_between():
    """float64 handed from layer to layer"""

    class Widen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.double())

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.float())

    return [Widen(), Narrow()]


@kind()
class MixedDtypes(nn.Module):
    """bfloat16, float32 and float64 weights in one layer"""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.high = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.low(x.bfloat16()).float() + self.middle(x.float()).float()
        return (h.double() * self.high).float()


@kind(autocast=False)
class ComplexLinear(nn.Module):
    """a linear with complex weights"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH // 2, WIDTH // 2, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.unflatten(1, (-1, 2)).contiguous())
        return x + torch.tanh(torch.view_as_real(self.inner(z)).flatten(1))


@kind(autocast=False)
def complex_conv():
    """a convolution with complex weights"""
    return Layer(
        lambda m, x: x + m.inner(torch.complex(x, torch.tanh(x))[:, None])[:, 0].abs(),
        inner=nn.Conv1d(1, 1, 3, padding=1, dtype=torch.complex64),
    )


@kind(autocast=False)
def complex_between():
    """complex numbers handed from layer to layer"""

    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.complex(x, x * 0.5))

    class Back(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)

        def forward(self, z: Tensor) -> Tensor:
            return torch.tanh(self.inner(z).real)

    return [Turn(), Back()]


@kind()
class OwnAutocast(nn.Module):
    """a layer with its own torch.autocast"""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = torch.tanh(self.inner(self.inner(x)))
        return self.outer(h.float()).float()


@kind()
class NoAutocast(Inner):
    """a layer that turns autocast off"""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(self.inner(x.float()))
