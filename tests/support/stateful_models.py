"""Models whose forward, loss or mode has a state of its own in Python, beside parameters and buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.plain import WIDTH


class Tower(nn.Module):
    """Blocks and a head."""

    def __init__(self, block: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class CountingAndDrawing(Tower):
    """Scales its input by how often it was called, and adds noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.noise = iter(range(1000)), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + 0.1 * next(self.calls)) + torch.randn(x.shape, generator=self.noise)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class SkipsOne(Tower):
    """Leaves one block out, by its number."""

    def forward(self, x: Tensor) -> Tensor:
        for n, block in enumerate(self.blocks):
            if n != 2:
                x = torch.tanh(block(x))
        return self.head(x)


class CountingLoss:
    """Adds a penalty that grows with the number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(output, target) + 0.01 * self.calls * output.square().mean()


class Context:
    """What blocks share: a number that they change, and a table that the first one makes."""

    def __init__(self) -> None:
        self.total: float | Tensor = 0.0
        self.table: Tensor | None = None
        self.size = 0


class SharingBlock(nn.Linear):
    """Looks numbers up in a table that the blocks share."""

    context = Context()

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.shared = self.context

    def forward(self, x: Tensor) -> Tensor:
        if self.shared.size < x.shape[-1]:
            self.shared.size, self.shared.table = x.shape[-1], torch.linspace(0.5, 1.0, x.shape[-1])
        assert self.shared.table is not None
        return super().forward(x * self.shared.table)


class AddingBlock(SharingBlock):
    """Adds a term of the loss to what the blocks share."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.shared.total = self.shared.total + out.detach().square().mean()
        return out


class Merging(nn.Linear):
    """Computes something else once `train` was called with False."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if self.merged else 1.0)


class Peeking(Tower):
    """Reads an attribute of a module that another layer calls, by getattr."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Merging(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x) * (2.0 if getattr(self.stem, "merged", False) else 1.0)


def tower(kind: type[Tower], block: type[nn.Module] | None = None) -> Tower:
    """Return a model, always with the same numbers and a context of its own."""
    torch.manual_seed(5)
    SharingBlock.context = Context()
    return kind() if block is None else kind(block)


class Remembering(nn.Linear):
    """Keeps a statistic of what it computed last."""

    last: float | Tensor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = out.detach().square().mean()
        return out
