"""Keyword inputs and default arguments."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.zoo.forward import Parts, forward


def one(name: str) -> Callable[[Tensor], dict[str, Tensor]]:
    """One other input, made of the batch."""
    return lambda x: {name: x.float().cos()}


@forward(inputs=one("value"))
class InputNamedValueInTheLoop(Parts):
    """an optional input called value, used in every block"""

    def forward(self, h, value=None):
        h = self.stem(h)
        for part in self.parts:
            h = part(h)
            if value is not None:
                h = h + 0.1 * value
        return self.head(h)


@forward(inputs=lambda x: {"x": x.float().sin(), "y": x.float().cos(), "t": torch.arange(len(x))})
class InputsOfADiffusionModel(Parts):
    """inputs called t, x and y, in an order of their own"""

    def forward(self, noisy, t, x, y):
        h = self.stem(noisy) + x / (1 + t[:, None])
        for part in self.parts:
            h = part(h) + 0.1 * y
        return self.head(h)


@forward(inputs=one("named"))
class InputsOfOurOwnNames(Parts):
    """inputs called named, module and owner"""

    def forward(self, h, named=None, module=None, owner=0.5):
        h = self.stem(h) * owner
        for part in self.parts:
            h = part(h)
            if module is None and named is not None:
                h = h + named
        return self.head(h)


@forward(inputs=one("scale"))
class KeywordOnly(Parts):
    """inputs by keyword alone"""

    def forward(self, x, *, scale: Tensor, shift: float = 0.25):
        x = self.stem(x) * scale
        for part in self.parts:
            x = part(x) + shift
        return self.head(x)


@forward(refused=r"seen")
def default_list_written(parts: list[nn.Module]) -> nn.Module:
    """a list as a default argument, which the forward appends to"""

    class Writes(Parts):
        def forward(self, x, seen=[]):
            x = self.stem(x)
            seen.append(1.0)
            for part in self.parts:
                x = part(x)
            return self.head(x) * (1 + 0.01 * len(seen))

    return Writes(parts)


@forward()
class DefaultRead(Parts):
    """a list and a dictionary as default arguments, which nobody writes"""

    def forward(self, x, scales=[0.5, 1.5], shifts={"in": 0.25}):
        x = self.stem(x) * scales[0] + shifts["in"]
        for part in self.parts:
            x = part(x)
        return self.head(x) * scales[1]
