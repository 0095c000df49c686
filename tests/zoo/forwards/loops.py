"""Location of the blocks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.forward import InARow, Parts, forward
from tests.zoo.forwards.calls import Wrapper
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
class StemIsASequential(InARow):
    """a loop behind a larger nn.Sequential"""

    def __init__(self, parts):
        super().__init__(parts)
        self.stem = big()


@forward()
class EndsHaveSequentials(InARow):
    """a loop between two larger modules that have an nn.Sequential"""

    def __init__(self, parts):
        super().__init__(parts)
        self.stem, self.head = Big(), Big()


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
class LevelsOfModules(Parts):
    """two loops over lists of several modules, with two modules between them, as in a U-Net for diffusion"""

    def __init__(self, parts):
        super().__init__([])
        self.downs = nn.ModuleList([nn.ModuleList([Wrapper(p), nn.Linear(WIDTH, WIDTH)]) for p in parts])
        self.mid1, self.mid2 = Big(), Big()
        self.ups = nn.ModuleList([nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH), Big()]) for _ in parts])

    def forward(self, x):
        x = self.stem(x)
        skips = []
        for block, down in self.downs:
            x = block(x)
            skips.append(x)
            x = down(x)
        x = self.mid1(x)
        x = self.mid2(x)
        for n, (up, block) in enumerate(self.ups):
            if n == 1:
                x = torch.sin(x)
            x = block(up(torch.cat((x, skips.pop()), dim=1)))
        return self.head(x)


@forward()
class LoopInAMethod(InARow):
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
    """forward_features with an nn.Sequential and modules that may be None, and forward_head, as in vision transformers"""

    def __init__(self, parts):
        super().__init__(parts)
        self.parts = nn.Sequential(*parts)
        self.token = nn.Parameter(torch.zeros(1, WIDTH))
        self.norm, self.neck, self.pool, self.early = nn.LayerNorm(WIDTH), None, "all", False

    def embed(self, x):
        to_cat = []
        if self.token is not None:
            to_cat.append(self.token.expand(len(x), -1))
        if self.early:
            x = x + self.token
        else:
            if to_cat:
                x = torch.cat([*to_cat, x], dim=1)[:, :WIDTH] + x
        return x

    def forward_features(self, x):
        """Run the blocks."""
        x = self.stem(x)
        x = self.embed(x)
        if self.early and not torch.jit.is_scripting():
            x = torch.utils.checkpoint.checkpoint_sequential(self.parts, 2, x)
        else:
            x = self.parts(x)
        return self.norm(x)

    def forward_head(self, x, pre_logits: bool = False, pool=None):
        if self.neck is not None:
            x = self.neck(x)
        pool = self.pool if pool is None else pool
        x = torch.sin(x) if pool == "all" else x
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


@forward(
    bounded="a weight's gradient is the sum over two places",
    refused=r"is used at several places on several ranks",
)
class SameMethodTwice(Parts):
    """a method with the loop, called twice"""

    def run(self, x, flip):
        if flip:
            x = -x
        for part in self.parts:
            x = part(x)
        return x

    def forward(self, x):
        x = self.run(self.stem(x), False)
        x = self.run(x, True)
        return self.head(x)


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
class EncoderAndDecoder(Parts):
    """a decoder whose blocks take what the encoder returned, each in a method with its loop"""

    def __init__(self, parts):
        super().__init__(parts)
        self.cross = nn.ModuleList([nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(3)])

    def encode(self, x):
        h = self.stem(x)
        for part in self.parts:
            h = part(h)
        return h

    def decode(self, memory, x):
        h = torch.cos(x)
        for layer in self.cross:
            h = h + torch.tanh(layer(h, memory))
        return h

    def forward(self, x):
        return self.head(self.decode(self.encode(x), x))


@forward()
class OneLine(Parts):
    """head(blocks(stem(x)))"""

    def __init__(self, parts):
        super().__init__(parts)
        self.parts = nn.Sequential(*parts)

    def forward(self, x):
        return self.head(self.parts(self.stem(x)))


@forward(refused=r"stages but only \d+ block")  # the stem and the head are no blocks
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
    """variables for the blocks and a layer"""

    def forward(self, x):
        x = self.stem(x)
        blocks, head = self.parts, self.head
        for i in range(len(blocks)):
            x = blocks[i](x)
        return head(x)


class Within(Parts):
    """Has the loop in its own forward, too."""

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return x


class Outer(nn.Module):
    """Has the blocks in a model within."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.backbone(x)
        return self.head(x)


@forward()
class AliasOfTheBackbone(Outer):
    """base = self.backbone.model, and the loop over base.parts"""

    def __init__(self, parts):
        super().__init__(nn.Module())
        self.backbone.model = Parts(parts)

    def forward(self, x):
        base = self.backbone.model
        x = base.stem(x)
        for part in base.parts:
            x = part(x)
        return base.head(x)


@forward()
class BackboneEndsInItsLoop(Outer):
    """a backbone whose forward ends in its loop"""

    def __init__(self, parts):
        super().__init__(Within(parts))


class Alone(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


@forward()
class BackboneIsItsLoop(Outer):
    """a backbone that has the loop and nothing else, and a forward that returns self.backbone(x)"""

    def __init__(self, parts):
        super().__init__(Alone(parts))

    def forward(self, x):
        return self.backbone(x)


class Returns(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x):
        return self.parts(x)


@forward()
class BackboneReturnsItsSequential(Outer):
    """a backbone whose forward returns self.parts(x), in a model that does the same"""

    def __init__(self, parts):
        super().__init__(Returns(parts))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.backbone(x) * self.scale


class WithFeatures(Parts):
    def forward_features(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return x

    def forward(self, x):
        return self.head(self.forward_features(x))


@forward()
class BackboneWithMethods(Outer):
    """self.backbone.forward_features(x), a method of a submodule that has the loop"""

    def __init__(self, parts):
        super().__init__(WithFeatures(parts))

    def forward(self, x):
        x = self.backbone.forward_features(x)
        return self.head(x)


def halves(parts: list[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    half = -(-len(parts) // 2)
    return parts[:half], parts[half:]


@forward(refused=r"only 2 block")
class NestedLoops(Parts):
    """a loop over stages, and in each a loop over its blocks"""

    def __init__(self, parts):
        super().__init__([])
        self.stages = nn.ModuleList([nn.ModuleList(half) for half in halves(parts)])

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            for part in stage:
                assert x.dim() == 2
                x = part(x)
            x = x * 0.5
        return self.head(x)


class Stage(Alone):
    def __init__(self, parts, down):
        super().__init__([Wrapper(part) for part in parts])
        self.down = nn.Linear(WIDTH, WIDTH) if down else None

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        if self.down is not None:
            x = self.down(x)
        return x


@forward()
class StagesWithForwards(InARow):
    """stages whose forwards have the blocks, as in hierarchical vision transformers"""

    def __init__(self, parts):
        super().__init__([])
        first, second = halves(parts)
        self.parts = nn.ModuleList([Stage(first, True), Stage(second, False)])


@forward()
class SequentialOfStages(Parts):
    """nn.Sequentials of blocks in an nn.Sequential"""

    def __init__(self, parts):
        super().__init__([])
        first, second = ([Wrapper(part) for part in half] for half in halves(parts))
        self.parts = nn.Sequential(nn.Sequential(*first), nn.Linear(WIDTH, WIDTH), nn.Sequential(*second))

    def forward(self, x):
        return self.head(self.parts(self.stem(x)))


class Mixture(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part, self.gate = part, nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        out = 0
        for i, expert in enumerate(self.experts):
            out = out + weights[..., i : i + 1] * expert(x)
        return self.part(x) + out


@forward()
class BlocksWithLoops(InARow):
    """blocks with a loop of their own, whose rounds stand side by side"""

    def __init__(self, parts):
        super().__init__([Mixture(part) for part in parts])


@forward()
class TwoTowers(Parts):
    """two towers with blocks behind methods, and a scale of the model"""

    def __init__(self, parts):
        super().__init__([])
        self.left = Within(parts)
        self.right = Within([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(()))

    def encode_left(self, x):
        return torch.tanh(self.left(x))

    def encode_right(self, x):
        return F.normalize(self.right(x), dim=-1)

    def forward(self, x):
        left = self.encode_left(x)
        right = self.encode_right(x)
        return self.scale.exp() * left + self.head(right)
