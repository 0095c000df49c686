"""Calls in a forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.forward import Parts, forward
from tests.zoo.kind import WIDTH

REFUSED = r"pre\b"


@forward()
class Loop(Parts):
    """a loop over an nn.ModuleList between two layers"""

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward()
class MethodBefore(Parts):
    """a method of the model before the blocks, which uses one module"""

    def pre(self, x):
        return torch.tanh(self.stem(x)) * 0.5

    def forward(self, x):
        x = self.pre(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward()
class MethodAfter(Parts):
    """a method of the model after the blocks, which uses one module"""

    def post(self, x):
        return self.head(x) * 2

    def forward(self, x):
        x = self.stem(x)
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


@forward()
class MethodNamedAsTheModule(Parts):
    """a method whose only statement calls a module of nearly the same name, and adds to it"""

    def _stem(self, x):
        return self.stem(x) + x

    def forward(self, x):
        x = self._stem(x)
        for part in self.parts:
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
    """a method of a submodule before the blocks, in place of its forward"""

    def __init__(self, parts):
        super().__init__(parts)
        self.emb = Embed()

    def forward(self, x):
        x = self.emb.embed(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward()
class MethodOfASubmoduleAfter(Parts):
    """a method of a submodule after the blocks, in place of its forward"""

    def __init__(self, parts):
        super().__init__(parts)
        self.out = Embed()

    def forward(self, x):
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


@forward()
class MethodOfTheBlock(Parts):
    """blocks by a method in place of their forward"""

    def __init__(self, parts):
        super().__init__([Wrapper(part) for part in parts])

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part.run(x)
        return self.head(x)


@forward()
class MethodOfANumberedBlock(Parts):
    """blocks by number, and by a method in place of their forward"""

    def __init__(self, parts):
        super().__init__([Wrapper(part) for part in parts])

    def forward(self, x):
        x = self.stem(x)
        for i in range(len(self.parts)):
            x = self.parts[i].run(x)
        return self.head(x)


@forward()
class AttributesOfTheBlock(Parts):
    """what a block holds, called without the block"""

    def __init__(self, parts):
        super().__init__([Wrapper(part) for part in parts])

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part.inner(x)
        return self.head(x)


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
class FunctionInAnAttribute(Parts):
    """a function in an attribute: self.pre = torch.tanh"""

    def __init__(self, parts):
        super().__init__(parts)
        self.pre = torch.tanh

    def forward(self, x):
        x = self.pre(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward(refused=REFUSED)
class PartialInAnAttribute(Parts):
    """functools.partial in an attribute"""

    def __init__(self, parts):
        super().__init__(parts)
        self.pre = partial(F.leaky_relu, negative_slope=0.3)

    def forward(self, x):
        x = self.pre(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward(refused=rf"{REFUSED}|without owning")
class LambdaInAnAttribute(Parts):
    """a lambda in an attribute, which uses a module of the model"""

    def __init__(self, parts):
        super().__init__(parts)
        self.pre = lambda x: self.stem(x) * 0.5

    def forward(self, x):
        x = self.pre(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward(refused=rf"{REFUSED}|without owning")
class BoundMethodInAnAttribute(Parts):
    """a submodule's method in an attribute"""

    def __init__(self, parts):
        super().__init__(parts)
        self.emb = Embed()
        self.pre = self.emb.embed

    def forward(self, x):
        x = self.pre(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward(refused=r"pre\b|method")
class MethodReplacedOnTheModel(Parts):
    """a method that the model replaces for itself"""

    def __init__(self, parts):
        super().__init__(parts)
        self.pre = lambda x: torch.sin(x)

    def pre(self, x):
        return self.stem(x)

    def forward(self, x):
        x = self.pre(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward(refused=r"forward|without owning|device meta")
class ForwardReplacedOnASubmodule(Parts):
    """a submodule whose forward was replaced from outside"""

    def __init__(self, parts):
        super().__init__(parts)
        plain = self.stem.forward
        self.stem.forward = lambda x: plain(x) * 0.5

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


class Doubled(nn.Linear):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 2


@forward()
class CallOfItsOwn(Parts):
    """a submodule with a __call__ of its own"""

    def __init__(self, parts):
        super().__init__(parts)
        self.stem = Doubled(WIDTH, WIDTH)

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


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

    def pre(self, x):
        return x

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

    def forward(self, x):
        x = self.pre(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


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


@forward(refused=r"__getattr__|inner|stem")
def asks_another_for_attributes(parts: list[nn.Module]) -> nn.Module:
    """a model whose __getattr__ looks in the model within"""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Parts(parts)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x):
            x = self.stem(x)
            for part in self.parts:
                x = part(x)
            return self.head(x)

    return Outer()


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
