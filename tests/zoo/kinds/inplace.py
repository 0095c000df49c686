"""In-place operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.kind import WIDTH, Inner, kind


class Shift(nn.Module):
    """Stands before a layer that writes into its input: an addition saves nothing that could be spoiled."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


@kind()
def relu_in_place_first():
    """nn.LeakyReLU(inplace=True) as the first of a layer"""
    return [Shift(), nn.Sequential(nn.LeakyReLU(0.3, inplace=True), nn.Linear(WIDTH, WIDTH))]


class Begins(Inner):
    """Writes into its input in one of several ways."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return torch.tanh(self.inner(x))


REFUSES = r"in.place|leaf Variable|a view of a leaf"


@kind(refused=REFUSES, when="split")
def writes_at_the_beginning():
    """an operation in place on the layer's input, by hand"""
    return [Shift(), Begins(lambda x: x.mul_(1.5))]


@kind(refused=REFUSES, when="split")
def writes_a_view_at_the_beginning():
    """an operation in place on a view of the layer's input"""
    return [Shift(), Begins(lambda x: x.view(-1, 2, WIDTH // 2)[:, 1].add_(1.0))]


@kind()
class WritesInTheMiddle(Inner):
    """operations in place in the middle of a layer"""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h.add_(1.0).mul_(0.5)
        h += x
        return h.tanh_()


@kind()
class WritesAView(Inner):
    """operations in place on views of what a linear returned"""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h[:, :2].mul_(2.0)
        h.view(-1, 2, WIDTH // 2)[:, 0] += 1.0
        left, right = h.split(WIDTH // 2, 1)
        return torch.cat([left, right * left], 1)


@kind(refused=r"modified.*in.?place")
class SpoilsWhatIsSaved(Inner):
    """an operation in place on what the backward needs: plain PyTorch refuses it, too"""

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        out = self.inner(h)
        h.mul_(2.0)
        return out + h


SHARES = r"in.place|share|one memory|leaf Variable|a view of a leaf"


def shared(pack: Callable[[Tensor], Any], write: Callable[[Any], Tensor]) -> list[nn.Module]:
    """Two layers: the first returns tensors that share memory, the second writes into one and uses all."""

    class First(Inner):
        def forward(self, x: Tensor) -> Any:
            return pack(self.inner(x) + 1.0)  # an addition saves nothing that could be spoiled

    class Second(Inner):
        def forward(self, value: Any) -> Tensor:
            return torch.tanh(self.inner(write(value)))

    return [First(), Second()]


@kind(refused=SHARES, when="split")
def one_tensor_twice_and_written():
    """one tensor twice in a tuple, and an operation in place on the first"""
    return shared(lambda h: (h, h), lambda v: v[0].mul_(2.0) + v[1] * 0.5)


@kind(refused=SHARES, when="split")
def view_written():
    """a tensor and its view, and an operation in place on the view"""

    def write(v: tuple[Tensor, Tensor]) -> Tensor:
        v[1].mul_(2.0)
        return v[0] * 1.0

    return shared(lambda h: (h, h[:, : WIDTH // 2]), write)


@kind(refused=SHARES, when="split")
def detached_and_written():
    """a tensor and itself detached, and an operation in place on the detached one"""

    def write(v: tuple[Tensor, Tensor]) -> Tensor:
        v[1].mul_(0.5)
        return v[0] * 1.0 + v[1]

    return shared(lambda h: (h, h.detach()), write)


@kind(refused=SHARES, when="split")
def constants_written():
    """one tensor without a gradient twice, deep within, and an operation in place on the first"""

    def write(v: list[Any]) -> Tensor:
        v[1]["mask"][0].mul_(0.5)
        return v[0] * v[1]["mask"][1] + v[1]["mask"][0]

    def pack(h: Tensor) -> list[Any]:
        mask = (h.detach() > 0).to(h.dtype)
        return [h, {"mask": (mask, mask)}]

    return shared(pack, write)


@kind()
def one_tensor_twice_and_copied():
    """one tensor twice in a tuple, and an operation in place on a copy"""
    return shared(lambda h: (h, h), lambda v: v[0].clone().mul_(2.0) + v[1] * 0.5)
