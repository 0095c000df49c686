"""Models whose numbers depend on their mode and on plain attributes, with changes that people make between two steps."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.own_models import VOCABULARY, WIDTH, Block, Parts

FACTOR = 1.0
TABLE = {"factor": 1.0}


class Stem(nn.Module):
    """Its numbers depend on its own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x) if self.training else self.inner(x) * 3


class Backbone(nn.Module):
    """A forward with the blocks, which another model calls; it reads its own mode and attributes."""

    level = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.gain = 1.0

    @property
    def doubled(self):
        return self.gain * 2

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * (1.0 if self.training else 0.5)
        return x * self.level * self.doubled


class Changing(nn.Module):
    """Reads modes and attributes everywhere: in statements, a method, an inner forward, and the loss."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.stem = Stem()
        self.backbone = Backbone()
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.cfg = SimpleNamespace(factor=1.0, inner=SimpleNamespace(factor=1.0))
        self.opts = {"factor": 1.0}
        self.sizes = [1.0, 2.0]
        self.act = torch.tanh
        self.bias = 0.0

    def embed(self, x):
        # Not the same for all features: the norm would take that away again.
        x = self.stem(self.embedding(x)) + self.bias * torch.arange(WIDTH)
        return x if self.training else x * 2

    def forward(self, x, y=None):
        x = self.embed(x) * self.scale
        x = self.backbone(x)
        x = self.act(self.norm(x)) * self.cfg.factor * self.cfg.inner.factor
        x = x * self.opts["factor"] + self.sizes[0]
        logits = self.head(x) * FACTOR * TABLE["factor"]
        if y is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return loss if self.training else loss * 7


MODES = {
    "the whole model": "net.eval()",
    "its stem": "net.stem.eval()",
    "a backbone": "net.backbone.eval()",
    "a norm": "net.norm.eval()",
    "its own flag alone": "net.training = False",
}

VALUES = [
    "type(net).scale = 0.5",
    "type(net.backbone).level = 0.5",
    "TABLE['factor'] = 0.5",
    "globals()['FACTOR'] = 0.5",
    "net.bias = 0.25",
    "net.scale = 0.25",
    "net.backbone.level = 0.25",
    "net.backbone.gain = 0.5",
    "net.cfg.factor = 0.5",
    "net.cfg.inner.factor = 0.5",
    "net.cfg = SimpleNamespace(factor=0.75, inner=SimpleNamespace(factor=1.0))",
    "net.opts['factor'] = 0.5",
    "net.sizes[0] = 0.5",
    "net.act = torch.sigmoid",
]
"""Changes of values; each counts also after those before it."""


def change(net: nn.Module, statement: str) -> None:
    """Execute a statement that changes a model."""
    exec(statement, globals(), {"net": net})


def restore() -> None:
    """Undo the changes of classes and globals."""
    Changing.scale = Backbone.level = TABLE["factor"] = 1.0
    globals()["FACTOR"] = 1.0


class Decided(Parts):
    """Attributes decide its branches and the rounds of its loops."""

    wide = True

    def __init__(self) -> None:
        super().__init__()
        self.cfg = SimpleNamespace(deep=True, inner=SimpleNamespace(blocks=4))
        self.opts = {"norm": True}
        self.ways = [True]
        self.flag = True

    def finish(self, x):
        return self.head(x)

    def forward(self, x):
        x = self.embedding(x)
        if self.wide:
            x = x * 2
        if self.cfg.deep:
            x = x * 3
        if self.opts["norm"]:
            x = self.norm(x)
        if self.ways[0]:
            x = x + 1
        if self.flag:
            x = x - 1
        for block in self.blocks[: self.cfg.inner.blocks]:
            x = block(x)
        return self.finish(x)


class Criterion(nn.Module):
    """A loss that depends on its mode, by a module within it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.5)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(self.inner(output).flatten(0, 1), target.flatten())
        return loss * 5 if self.training else loss
