"""Calls in a forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.forward import InARow, Parts, forward
from tests.zoo.kind import WIDTH


@forward()
class Loop(InARow):
    """a loop over an nn.ModuleList between two layers"""


class Before(Parts):
    """Calls something of its own before the blocks."""

    def forward(self, x):
        x = self.pre(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward()
class MethodBefore(Before):
    """a method of the model before the blocks, which uses one module"""

    def pre(self, x):
        return torch.tanh(self.stem(x)) * 0.5


@forward()
class MethodNamedAsTheModule(Parts):
    """a method whose only statement calls a module of nearly the same name, and adds to it; and one after the blocks"""

    def _stem(self, x):
        return self.stem(x) + x

    def post(self, x):
        return self.head(x) * 2

    def forward(self, x):
        x = self._stem(x)
        for part in self.parts:
            x = part(x)
        x = self.post(x)
        return x


@forward()
class MethodBetween(Parts):
    """a method of the model between two loops, which uses one module"""

    def mix(self, x):
        return x + torch.sin(self.stem(x))

    def forward(self, x):
        for part in self.parts[:1]:
            x = part(x)
        x = self.mix(x)
        for part in self.parts[1:]:
            x = part(x)
        return self.head(x)


class Embed(nn.Module):
    """A module with a method beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def embed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@forward()
class MethodOfASubmodule(Parts):
    """a method of a submodule before the blocks, and one after them, in place of its forward"""

    def __init__(self, parts):
        super().__init__(parts)
        self.emb, self.out = Embed(), Embed()

    def forward(self, x):
        x = self.emb.embed(x)
        for part in self.parts:
            x = part(x)
        x = self.out.embed(x)
        return x


@forward()
class MethodOfADeepSubmodule(Parts):
    """a method of a submodule's submodule, through an nn.ModuleDict"""

    def __init__(self, parts):
        super().__init__(parts)
        self.nets = nn.ModuleDict({"in": Embed(), "out": Embed()})

    def forward(self, x):
        x = self.nets["in"].embed(x)
        for part in self.parts:
            x = part(x)
        x = self.nets["out"](x)
        return self.head(x)


class Wrapper(nn.Module):
    """A block with a method beside its forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def run(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class OfWrappers(Parts):
    def __init__(self, parts):
        super().__init__([Wrapper(part) for part in parts])


@forward()
class MethodOfTheBlock(OfWrappers):
    """blocks by a method in place of their forward"""

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part.run(x)
        return self.head(x)


@forward()
class MethodOfANumberedBlock(OfWrappers):
    """blocks by number, and by a method in place of their forward"""

    def forward(self, x):
        x = self.stem(x)
        for i in range(len(self.parts)):
            x = self.parts[i].run(x)
        return self.head(x)


@forward()
class AttributesOfTheBlock(OfWrappers):
    """what a block holds, called without the block"""

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part.inner(x)
        return self.head(x)


@forward()
class BlocksByKeyword(OfWrappers):
    """blocks whose argument has its name, and a head with a list of arguments"""

    def forward(self, x):
        x = self.stem(input=x)
        for part in self.parts:
            x = part(x=x)
        return self.head(*[x])


@forward(refused=r"hands on|as a whole|run_block")
class MethodThatTakesTheBlock(Parts):
    """a method of the model that takes a block"""

    def run_block(self, part, x):
        return x + 0.5 * part(x)

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = self.run_block(part, x)
        return self.head(x)


@forward()
class FunctionInAnAttribute(Before):
    """a function in an attribute: self.pre = torch.tanh"""

    def __init__(self, parts):
        super().__init__(parts)
        self.pre = torch.tanh


@forward(refused=r"pre\b")
class PartialInAnAttribute(Before):
    """functools.partial in an attribute"""

    def __init__(self, parts):
        super().__init__(parts)
        self.pre = partial(F.leaky_relu, negative_slope=0.3)


@forward(refused=r"pre\b|without owning")
class LambdaInAnAttribute(Before):
    """a lambda in an attribute, which uses a module of the model"""

    def __init__(self, parts):
        super().__init__(parts)
        self.pre = lambda x: self.stem(x) * 0.5


@forward(refused=r"pre\b|method")
class MethodReplacedOnTheModel(Before):
    """a method that the model replaces for itself"""

    def __init__(self, parts):
        super().__init__(parts)
        self.pre = lambda x: torch.sin(x)

    def pre(self, x):
        return self.stem(x)


@forward(refused=r"forward|without owning|device meta")
class ForwardReplacedOnASubmodule(InARow):
    """submodules whose forwards were replaced from outside"""

    def __init__(self, parts):
        super().__init__([Wrapper(part) for part in parts])
        plain = self.stem.forward
        self.stem.forward = lambda x: plain(x) * 0.5
        for part in self.parts:
            part.forward = partial(type(part).run, part)


class Doubled(Wrapper):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 2


@forward()
class CallOfItsOwn(InARow):
    """modules with a __call__ of their own"""

    def __init__(self, parts):
        super().__init__([Doubled(part) for part in parts])
        self.stem = Doubled(nn.Linear(WIDTH, WIDTH))


@forward()
class CallOfItsOwnInASequential(Parts):
    """modules with a __call__ of their own in an nn.Sequential"""

    def __init__(self, parts):
        super().__init__([])
        self.parts = nn.Sequential(*[Doubled(part) for part in parts])

    def forward(self, x):
        return self.head(self.parts(self.stem(x)))


@forward(refused=r"forward|__call__")
class ForwardByName(Parts):
    """self.stem.forward(x) and self.head.__call__(x)"""

    def forward(self, x):
        x = self.stem.forward(x)
        for part in self.parts:
            x = part.forward(x)
        x = self.head.__call__(x)
        return x


@forward(refused=r"super")
class MethodOfTheParent(MethodBefore):
    """super().pre(x) in the forward"""

    def forward(self, x):
        x = super().pre(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward(refused=r"super")
class MethodThatCallsItsParent(MethodBefore):
    """super().pre(x) in a method"""

    def pre(self, x):
        return super().pre(x) + x


@forward()
class ForwardOfTheParent(InARow):
    """super().forward(x) in the forward"""

    def forward(self, x, temperature=2.0):
        return super().forward(x - 0.5) / temperature


@forward()
class StaticMethods(Parts):
    """static methods and class methods"""

    @staticmethod
    def pre(x):
        return torch.tanh(x)

    @classmethod
    def post(cls, x):
        return x * 0.5

    def forward(self, x):
        x = self.pre(x)
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        x = self.post(x)
        return self.head(x)


@forward(refused=r"entry")
class ModuleFromAProperty(Parts):
    """a property that returns a module"""

    @property
    def entry(self):
        return self.stem

    def forward(self, x):
        x = self.entry(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward(refused=r"state|share|in.place")
class OneTupleWithAnAlias(Parts):
    """a tuple with one tensor twice, one of which the next block writes in place"""

    def forward(self, x):
        x = self.stem(x)
        state = (x, x)
        for part in self.parts:
            one, other = state
            one.add_(0.5)
            x = part(one * 1.0) + other
            state = (x, x)
        return self.head(state[0])


@forward(refused=r"other|share|in.place")
class TwoVariablesOfOneTensor(Parts):
    """two variables of one tensor, one of which the blocks write in place"""

    def forward(self, x):
        x = self.stem(x)
        other = x
        for part in self.parts:
            x.add_(0.5)
            x = part(x * 1.0) + other
            other = x
        return self.head(x)
