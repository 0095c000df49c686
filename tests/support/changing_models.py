"""Models whose numbers depend on their mode and on plain attributes, with changes that people make between two steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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
        x = self.stem(self.embedding(x)) + self.bias
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


def whole_model_eval(net: Changing) -> None:
    net.eval()


def stem_eval(net: Changing) -> None:
    net.stem.eval()


def backbone_eval(net: Changing) -> None:
    net.backbone.eval()


def norm_eval(net: Changing) -> None:
    net.norm.eval()


def own_flag_alone(net: Changing) -> None:
    net.training = False


def instance_attribute(net: Changing) -> None:
    net.bias = 0.25


def instance_over_class_attribute(net: Changing) -> None:
    net.scale = 0.5


def field_of_a_config(net: Changing) -> None:
    net.cfg.factor = 0.5


def nested_field(net: Changing) -> None:
    net.cfg.inner.factor = 0.5


def other_config(net: Changing) -> None:
    net.cfg = SimpleNamespace(factor=0.25, inner=SimpleNamespace(factor=1.0))


def entry_of_a_dict(net: Changing) -> None:
    net.opts["factor"] = 0.5


def item_of_a_list(net: Changing) -> None:
    net.sizes[0] = 0.5


def other_function(net: Changing) -> None:
    net.act = torch.sigmoid


def attribute_that_a_property_reads(net: Changing) -> None:
    net.backbone.gain = 0.5


def instance_over_class_attribute_of_an_inner_module(net: Changing) -> None:
    net.backbone.level = 0.5


def class_attribute(net: Changing) -> None:
    type(net).scale = 0.5


def class_attribute_of_an_inner_module(net: Changing) -> None:
    type(net.backbone).level = 0.5


def entry_of_a_global(net: Changing) -> None:
    TABLE["factor"] = 0.5


def global_variable(net: Changing) -> None:
    globals()["FACTOR"] = 0.5


MODES: list[Callable[[Any], None]] = [
    whole_model_eval, stem_eval, backbone_eval, norm_eval, own_flag_alone,
]  # fmt: skip

VALUES: list[Callable[[Any], None]] = [
    instance_attribute, instance_over_class_attribute, field_of_a_config, nested_field, other_config, entry_of_a_dict,
    item_of_a_list, other_function, attribute_that_a_property_reads, instance_over_class_attribute_of_an_inner_module,
    class_attribute, class_attribute_of_an_inner_module, entry_of_a_global, global_variable,
]  # fmt: skip


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
