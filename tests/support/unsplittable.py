"""Models that `penstock.split` must refuse, since layers alone would give other numbers, or it cannot know."""

from __future__ import annotations

import functools
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.own_models import SEQUENCE, WIDTH, Block, Looped, Parts, TorchsEncoder


class InARow(Parts):
    """The same blocks, in an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)


class SetsAttributeInMethod(InARow):
    def embed(self, x):
        self.kept = self.embedding(x)
        return self.kept

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


class HandsItselfOn(InARow):
    def forward(self, x):
        x = self.embedding(x)
        setattr(self, "kept", x)  # noqa: B010
        return self.head(self.blocks(x))


class CalledByKeyword(InARow):
    def forward(self, x):
        return self.head(self.blocks(input=self.embedding(x)))


class ReturnsEarly(Parts):
    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
            if x.mean() > 10:
                return x
        return self.head(x)


class ReadsBlocksAfterwards(InARow):
    def forward(self, x):
        x = self.blocks(self.embedding(x))
        return self.head(x) * sum(block.inner.weight.mean() for block in self.blocks)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.loss = 0.0

    def forward(self, x):
        self.loss = x.square().mean()
        return self.inner(x)


class ReadsAnAttributeLater(InARow):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x):
        x = self.blocks(self.router(self.embedding(x)))
        return self.head(x) + self.router.loss


class PlainList(Looped):
    def __init__(self) -> None:
        super().__init__()
        blocks = [*self.blocks]
        del self.blocks
        self.blocks = blocks


class CollectsInAttribute(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.losses = []

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
            self.losses.append(x.mean())
        return self.head(x)


class NoteTaking(Block):
    def __init__(self, notes) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x):
        self.notes.append(x.mean())
        return super().forward(x)


class BlocksShareAList(Looped):
    def __init__(self) -> None:
        super().__init__()
        notes = []
        self.blocks = nn.ModuleList([NoteTaking(notes) for _ in range(4)])


class LoopWithinIf(Parts):
    def forward(self, x):
        x = self.embedding(x)
        if x.mean() > 0:
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class LoopWithinWith(Parts):
    def forward(self, x):
        x = self.embedding(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        return self.head(x.float())


class HasAnElse(Parts):
    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        else:
            x = x * 2
        return self.head(x)


class Reduced(Parts):
    def forward(self, x):
        return self.head(functools.reduce(lambda v, block: block(v), self.blocks, self.embedding(x)))


class BreaksInMethod(Parts):
    def run(self, x, depth):
        for i, block in enumerate(self.blocks):
            if i == depth:
                break
            x = block(x)
        return x

    def forward(self, x, depth=3):
        return self.head(self.run(self.embedding(x), depth))


class ReturnsEarlyInMethod(InARow):
    def run(self, x):
        if x.mean() > 10:
            return x
        return self.blocks(x)

    def forward(self, x):
        return self.head(self.run(self.embedding(x)))


class DecoratedMethod(InARow):
    @torch.no_grad()
    def run(self, x):
        return self.blocks(x)

    def forward(self, x):
        return self.head(self.run(self.embedding(x)))


class HiddenModule(InARow):
    """A class attribute hides the module of the same name, so that Python calls the attribute."""

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.embedding(x))))


def _twice(self, x):
    return x * 2


HiddenModule.norm = _twice


class Answers(InARow):
    """A model that answers for names which it does not have."""

    def __getattr__(self, name):
        return super().__getattr__("norm" if name == "layer_norm" else name)

    def forward(self, x):
        return self.head(self.layer_norm(self.blocks(self.embedding(x))))


class Before(Parts):
    """A step before the blocks that is an attribute of the model."""

    def forward(self, x):
        x = self.pre(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Holder:
    def __init__(self, module) -> None:
        self.module = module

    def __call__(self, x):
        return self.module(x)


class ModuleOfItsClass(Before):
    pre = nn.Embedding(23, WIDTH)


class HandsItsDefaultOn(Parts):
    def forward(self, x, cache={}):
        x = self.embedding(x)
        notes = cache
        for block in self.blocks:
            x = block(x)
            notes["last"] = 1
        return self.head(x)


class FollowedMethodWritesIntoItsDefault(Parts):
    def run(self, x, seen=[]):
        for block in self.blocks:
            x = block(x)
            seen.append(1)
        return x

    def forward(self, x):
        return self.head(self.run(self.embedding(x)))


class Decorated(InARow):
    @torch.no_grad()
    def forward(self, x):
        return self.head(self.blocks(self.embedding(x)))


class Keywords(InARow):
    def forward(self, x, **named):
        x = self.embedding(x) * named.get("scale", 1)
        return self.head(self.blocks(x))


class UnregisteredTensor(InARow):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.rand(SEQUENCE, WIDTH)

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x)) + self.table)


class UsesAllParameters(InARow):
    def forward(self, x):
        x = self.blocks(self.embedding(x))
        return self.head(x) + sum(p.sum() for p in self.parameters())


class MayHaveNoValue(InARow):
    def forward(self, x):
        x = self.embedding(x)
        if x.mean() > 100:
            y = x
        x = self.blocks(x)
        return self.head(x if x.mean() < 100 else y)


class PythonsRandom(Parts):
    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            if random.random() < 0.5:
                x = block(x)
        return self.head(x)


class NumpysRandom(InARow):
    def forward(self, x):
        x = self.embedding(x) * float(np.random.rand())
        return self.head(self.blocks(x))


class Hooked(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, inputs, output: output * 2)


class TargetBeforeTheBlocks(InARow):
    def forward(self, x, y):
        x = self.embedding(x)
        y = y[:, 1:]
        logits = self.head(self.blocks(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), y.flatten())


class HeadBesideTheTarget(InARow):
    def forward(self, x, y):
        x, y = self.blocks(self.embedding(x)), y.flatten()
        return F.cross_entropy(self.head(x).flatten(0, 1), y)


class WeightTravels(InARow):
    def forward(self, x):
        weight = self.embedding.weight
        x = self.blocks(F.embedding(x, weight))
        return F.linear(x, weight)


class DeviceTravels(Parts):
    def forward(self, x):
        device = x.device
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x) + torch.zeros(1, device=device)
        return self.head(x)


class WritesIntoAView(Parts):
    def forward(self, idx):
        x = torch.zeros(*idx.shape, WIDTH)
        part = x[:, :2]
        for block in self.blocks:
            part.add_(1.0)
            y = block(x)
        return self.head(y + x)


class OneListTwoNames(Parts):
    def forward(self, x):
        x = self.embedding(x)
        first = second = []
        for block in self.blocks:
            x = block(x)
            first.append(x)
        return self.head(x + sum(second))


GATHERED = []


class GathersGlobally(InARow):
    def forward(self, x):
        x = self.blocks(self.embedding(x))
        GATHERED.append(x.mean())
        return self.head(x)


class GathersInItsClass(InARow):
    gathered = []

    def forward(self, x):
        x = self.blocks(self.embedding(x))
        return self.head(x) * len(self.gathered)


class Cached(InARow):
    @functools.cached_property
    def scale(self):
        return self.head.weight.mean()

    def forward(self, x):
        x = self.embedding(x) * self.scale
        return self.head(self.blocks(x))


class Sly(Block):
    """A block that uses another block's weight without owning it."""

    def __init__(self, others) -> None:
        super().__init__()
        self.others = others

    def forward(self, x):
        return super().forward(x) * self.others[0].inner.weight.mean()


class Peeking(Sly):
    """A block that reads what another block has left in an attribute."""

    def forward(self, x):
        return Block.forward(self, x) + getattr(self.others[0], "seen", 0)


class TorchsDecoder(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 1), 2)

    def forward(self, x):
        x = self.embedding(x)
        return self.head(self.decoder(x, x))


class NestedEncoder(TorchsEncoder):
    def __init__(self) -> None:
        super().__init__(nested=True)


class UnknownRounds(Parts):
    def forward(self, x):
        rounds = int(x.min()) + 2
        x = self.embedding(x)
        for i in range(rounds):
            x = self.blocks[i](x)
        return self.head(x)


REFUSED = {
    SetsAttributeInMethod: r"sets self\.kept",
    HandsItselfOn: r"hands on the model itself",
    CalledByKeyword: r"no loop over modules",
    ReturnsEarly: r"a return leaves its loop",
    ReadsBlocksAfterwards: r"uses self\.blocks as a whole",
    ReadsAnAttributeLater: r"an attribute or a method of self\.router",
    PlainList: r"an nn\.ModuleList",
    CollectsInAttribute: r"changes self\.losses",
    BlocksShareAList: r"blocks\.0\.notes and blocks\.1\.notes are one list",
    LoopWithinIf: r"within an if statement",
    HasAnElse: r"its loop over the blocks has an else",
    LoopWithinWith: r"within a with statement.*autocast=torch\.bfloat16",
    Reduced: r"no loop over modules",
    BreaksInMethod: r"a break leaves its loop",
    ReturnsEarlyInMethod: r"may return before its end",
    DecoratedMethod: r"DecoratedMethod\.run: it is decorated",
    HiddenModule: r"'norm' of a HiddenModule.*an attribute hides the module",
    Answers: r"'layer_norm' of a Answers, which a __getattr__ of its own gives",
    ModuleOfItsClass: r"self\.pre, which holds a Embedding",
    HandsItsDefaultOn: r"cache.*`cache=None`",
    FollowedMethodWritesIntoItsDefault: r"FollowedMethodWritesIntoItsDefault\.run: .*`seen=None`",
    Decorated: r"decorated .*unsplittable\.py:",
    TorchsDecoder: r"in torch's nn\.TransformerDecoder",
    UnknownRounds: r"number of rounds of the loop is not known",
    Keywords: r"it uses named",
    UnregisteredTensor: r"register_buffer\(\"table\"",
    UsesAllParameters: r"calls self\.parameters",
    MayHaveNoValue: r"the variable 'y' may have no value",
    PythonsRandom: r"the generator of random",
    NumpysRandom: r"the generator of numpy",
    Hooked: r"has hooks",
    GathersGlobally: r"uses GATHERED, a list outside of it",
    GathersInItsClass: r"uses self\.gathered, a list",
    Cached: r"uses self\.scale, a cached_property",
}
"""Models that are refused by their source, with the reason."""

REFUSED_WITH_LOSS = {
    TargetBeforeTheBlocks: r"uses y before the last block",
    HeadBesideTheTarget: r"logits = self\.head\(x\)",
}
REFUSED_WHEN_RUN = {
    NestedEncoder: "enable_nested_tensor=False",
    WeightTravels: r"'weight' is or has a Parameter",
    DeviceTravels: r"'device' is or has a device",
    WritesIntoAView: r"writes in place into the variable 'part'",
    OneListTwoNames: r"'first' and 'second' are one list",
}


class Notes:
    """What blocks leave for each other; not one of the containers that a split looks for."""

    def __init__(self) -> None:
        self.value: object = 0.0


class Remembering(Block):
    """A block that adds what the block before it left in an object, behind a gate that opens in training."""

    def __init__(self, notes: Notes, gate: float, begins: bool) -> None:
        super().__init__()
        self.notes, self.begins = notes, begins
        self.gate = nn.Parameter(gate * torch.linspace(0, 1, WIDTH))

    def forward(self, x):
        x = super().forward(x)
        if not self.begins:
            x = x + self.gate * self.notes.value
        self.notes.value = x.detach().mean(-1, keepdim=True)
        return x


class WithNotes(Looped):
    def __init__(self, gate: float = 1.0) -> None:
        super().__init__()
        notes = Notes()
        self.blocks = nn.ModuleList([Remembering(notes, gate, n == 0) for n in range(4)])
