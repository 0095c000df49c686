"""Location of the blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.forward import Parts, forward
from tests.zoo.kind import WIDTH

WIDE = 64


def big() -> nn.Sequential:
    """More weights than most of the zoo's layers."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDTH)
    )


class Big(nn.Module):
    """A module with an nn.Sequential in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = big()

    def forward(self, x):
        return x + 0.5 * self.layers(x)


@forward()
class StemIsASequential(Parts):
    """a loop behind a larger nn.Sequential"""

    def __init__(self, parts):
        super().__init__(parts)
        self.stem = big()

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward()
class StemHasASequential(Parts):
    """a loop behind a larger module that has an nn.Sequential"""

    def __init__(self, parts):
        super().__init__(parts)
        self.stem = Big()

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward()
class HeadHasASequential(Parts):
    """a loop before a larger module that has an nn.Sequential"""

    def __init__(self, parts):
        super().__init__(parts)
        self.head = Big()

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward()
class MiddleHasASequential(Parts):
    """two loops around a larger module that has an nn.Sequential"""

    def __init__(self, parts):
        super().__init__(parts)
        self.mid = Big()

    def forward(self, x):
        x = self.stem(x)
        half = len(self.parts) // 2
        for part in self.parts[:half]:
            x = part(x)
        x = self.mid(x)
        for part in self.parts[half:]:
            x = part(x)
        return self.head(x)


@forward()
class MiddleIsASequential(Parts):
    """two loops, with skips in a list, around a larger nn.Sequential"""

    def __init__(self, parts):
        super().__init__(parts)
        self.mid = big()
        self.ups = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in parts])

    def forward(self, x):
        x = self.stem(x)
        skips = []
        for part in self.parts:
            x = part(x)
            skips.append(x)
        x = self.mid(x)
        for up in self.ups:
            x = torch.tanh(up(torch.cat([x, skips.pop()], dim=1)))
        return self.head(x)


@forward()
class LoopInAMethod(Parts):
    """a forward that returns self._forward_impl(x)"""

    def _forward_impl(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)

    def forward(self, x):
        return self._forward_impl(x)


@forward()
class FeaturesAndHead(Parts):
    """forward_features with an nn.Sequential, and forward_head"""

    def __init__(self, parts):
        super().__init__(parts)
        self.parts = nn.Sequential(*parts)
        self.norm = nn.LayerNorm(WIDTH)

    def forward_features(self, x):
        x = self.stem(x)
        x = self.parts(x)
        return self.norm(x)

    def forward_head(self, x, pre_logits: bool = False):
        x = torch.sin(x)
        return x if pre_logits else self.head(x)

    def forward(self, x):
        x = self.forward_features(x)
        x = self.forward_head(x)
        return x


@forward()
class FeaturesInALoop(Parts):
    """forward_features with a loop and keyword arguments"""

    def forward_features(self, x, scale=1.0, *, shift=0.0):
        x = self.stem(x) * scale + shift
        for part in self.parts:
            x = part(x)
        return x

    def forward(self, x):
        features = self.forward_features(x, shift=0.5)
        return self.head(features)


@forward()
class MethodsTwoDeep(Parts):
    """a loop in a method of a method, with variables of the same name"""

    def blocks(self, h):
        x = h * 0.5
        for part in self.parts:
            x = part(x)
        return x + h

    def features(self, x):
        h = self.stem(x)
        return self.blocks(h)

    def forward(self, x):
        h = x
        x = self.features(x)
        return self.head(x) + h


@forward()
class MethodWithTwoResults(Parts):
    """a method with the loop that returns two values"""

    def encode(self, x):
        x = self.stem(x)
        first = x
        for part in self.parts:
            x = part(x)
        return x, first

    def forward(self, x):
        x, first = self.encode(x)
        return self.head(x) + first


@forward()
class OneLine(Parts):
    """head(blocks(stem(x)))"""

    def __init__(self, parts):
        super().__init__(parts)
        self.parts = nn.Sequential(*parts)

    def forward(self, x):
        return self.head(self.parts(self.stem(x)))


@forward()
class SeveralSequentials(Parts):
    """blocks in several nn.Sequentials: layer1, layer2, layer3"""

    def __init__(self, parts):
        super().__init__([])
        third = -(-len(parts) // 3)
        self.layer1 = nn.Sequential(*parts[:third])
        self.layer2 = nn.Sequential(*parts[third : 2 * third])
        self.layer3 = nn.Sequential(*parts[2 * third :])

    def forward(self, x):
        x = self.stem(x)
        x = self.layer1(x)
        x = F.leaky_relu(x, 0.1)
        x = self.layer2(x)
        x = self.layer3(x)
        return self.head(x)


@forward()
class AliasOfTheBlocks(Parts):
    """a variable for the blocks"""

    def forward(self, x):
        blocks = self.parts
        x = self.stem(x)
        for part in blocks:
            x = part(x)
        return self.head(x)


class Within(Parts):
    """Has the loop in its own forward, too."""

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return x


@forward()
def alias_of_the_backbone(parts: list[nn.Module]) -> nn.Module:
    """base = self.m.model, and the loop over base.parts"""

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Parts(parts)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = Holder()

        def forward(self, x):
            base = self.m.model
            x = base.stem(x)
            for part in base.parts:
                x = part(x)
            return base.head(x)

    return Outer()


@forward()
class BackboneEndsInItsLoop(nn.Module):
    """a backbone whose forward ends in its loop"""

    def __init__(self, parts):
        super().__init__()
        self.backbone = Within(parts)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.backbone(x)
        return self.head(x)


@forward()
class BackboneIsAll(nn.Module):
    """a forward that returns self.backbone(x), which ends in its loop"""

    def __init__(self, parts):
        super().__init__()
        self.backbone = Within(parts)

    def forward(self, x):
        return self.backbone(x)


@forward()
def backbone_is_its_loop(parts: list[nn.Module]) -> nn.Module:
    """a backbone that has the loop and nothing else"""

    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(parts)

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = Alone()

        def forward(self, x):
            return self.backbone(x)

    return Outer()


@forward()
def backbone_returns_its_sequential(parts: list[nn.Module]) -> nn.Module:
    """a backbone whose forward returns self.parts(x), in a model that does the same"""

    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.Sequential(*parts)

        def forward(self, x):
            return self.parts(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = Alone()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return self.backbone(x) * self.scale

    return Outer()


@forward()
def backbone_with_methods(parts: list[nn.Module]) -> nn.Module:
    """self.backbone.forward_features(x), a method of a submodule that has the loop"""

    class Backbone(Parts):
        def forward_features(self, x):
            x = self.stem(x)
            for part in self.parts:
                x = part(x)
            return x

        def forward(self, x):
            return self.head(self.forward_features(x))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = Backbone(parts)
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.backbone.forward_features(x)
            return self.head(x)

    return Outer()


@forward(refused=r"only 2 block")
class NestedLoops(Parts):
    """a loop over stages, and in each a loop over its blocks"""

    def __init__(self, parts):
        super().__init__([])
        half = -(-len(parts) // 2)
        self.stages = nn.ModuleList([nn.ModuleList(parts[:half]), nn.ModuleList(parts[half:])])

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            for part in stage:
                x = part(x)
            x = x * 0.5
        return self.head(x)


@forward(refused=r"getattr|hands on")
class LayersByGetattr(Parts):
    """getattr(self, f"layer{n}") in a loop"""

    def __init__(self, parts):
        super().__init__([])
        self.count = len(parts)
        for n, part in enumerate(parts):
            self.add_module(f"layer{n}", part)

    def forward(self, x):
        x = self.stem(x)
        for n in range(self.count):
            x = getattr(self, f"layer{n}")(x)
        return self.head(x)


def checkpoints(step: int, model: Any) -> None:
    model.grad_checkpointing = step >= 2


@forward(change=checkpoints, refused=r"grad_checkpointing")
class CheckpointedLater(Parts):
    """two ways through the blocks, one of them with activation checkpointing; an attribute says which, and changes"""

    def __init__(self, parts):
        super().__init__(parts)
        self.grad_checkpointing = False

    def forward(self, x):
        x = self.stem(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False)
        else:
            for part in self.parts:
                x = part(x)
        return self.head(x)


@forward()
class TwoTowers(Parts):
    """two towers side by side, each with its blocks"""

    def __init__(self, parts):
        super().__init__([])
        self.left = Within(parts)
        self.right = Within([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        left = self.left(x)
        right = self.right(x)
        return self.head(left * right)


@forward()
class TwoTowersByMethods(Parts):
    """two towers behind methods, and a scale of the model"""

    def __init__(self, parts):
        super().__init__([])
        self.left = Within(parts)
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(()))

    def encode_left(self, x):
        return torch.tanh(self.left(x))

    def encode_right(self, x):
        return F.normalize(self.right(x), dim=-1)

    def forward(self, x):
        left = self.encode_left(x)
        right = self.encode_right(x)
        return self.scale.exp() * left + self.head(right)
