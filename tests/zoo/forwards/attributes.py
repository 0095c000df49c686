"""Attributes that change between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.zoo.forward import InARow, Parts, forward
from tests.zoo.kind import WIDTH

REFUSED = r"factor|deep|config|scales|table"


def at(step: int, change: Callable[[Any], None]) -> Callable[[int, Any], None]:
    """Make a change before a step."""

    def changes(number: int, model: Any) -> None:
        if number == step:
            change(model)

    return changes


def set_factor(model: Any) -> None:
    model.factor = 2.0


@forward(change=at(1, set_factor), refused=REFUSED)
class NumberOfTheModel(Parts):
    """a number in an attribute"""

    def __init__(self, parts):
        super().__init__(parts)
        self.factor = 0.5

    def forward(self, x):
        x = self.stem(x) * self.factor
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward(change=at(1, lambda model: setattr(type(model).__mro__[1], "factor", 2.0)), refused=REFUSED)
def number_of_the_parent_class(parts: list[nn.Module]) -> nn.Module:
    """a number of the class above, read in a method"""

    class Base(Parts):
        factor = 0.5

        def scaled(self, x):
            return self.stem(x) * self.factor

    class Scaled(Base):
        def forward(self, x):
            x = self.scaled(x)
            for part in self.parts:
                x = part(x)
            return self.head(x)

    return Scaled(parts)


@dataclass
class Config:
    """What a model is built by."""

    factor: float = 0.5
    scales: list[float] = field(default_factory=lambda: [0.5, 1.5])


class Configured(Parts):
    def __init__(self, parts):
        super().__init__(parts)
        self.config = Config()
        self.extra = nn.Linear(WIDTH, WIDTH)


@forward(change=at(1, lambda model: setattr(model.config, "factor", 2.0)), refused=REFUSED)
class FieldOfTheConfigInTheLoop(Configured):
    """a field of a config object, through a variable, in the loop"""

    def forward(self, x):
        config = self.config
        x = self.stem(x)
        for part in self.parts:
            x = part(x) * config.factor
        return self.head(x)


@forward(change=at(1, lambda model: setattr(model, "config", Config(factor=2.0))), refused=REFUSED)
class ConfigReplaced(Configured):
    """a config object that is replaced"""

    def forward(self, x):
        x = self.stem(x) * self.config.scales[0]
        for part in self.parts:
            x = part(x)
        return self.head(x) * self.config.factor


@forward(change=at(1, lambda model: model.config.update(factor=2.0)), refused=REFUSED)
class ConfigIsADictionary(Configured):
    """an entry of a dictionary, by several calls"""

    def __init__(self, parts):
        super().__init__(parts)
        self.config = {"factor": 0.5, "shift": 0.25}

    def forward(self, x):
        x = self.stem(x) * self.config["factor"] + self.config.get("shift", 0.0)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward(change=at(1, lambda model: model.scales.__setitem__(0, 2.0)), refused=REFUSED)
class EntryOfAList(Parts):
    """an entry of a list, by the number of the block, and the sum of the list"""

    def __init__(self, parts):
        super().__init__(parts)
        self.scales = [0.5 + 0.1 * n for n in range(len(parts))]

    def forward(self, x):
        x = self.stem(x)
        for i, part in enumerate(self.parts):
            x = part(x) * self.scales[i]
        return self.head(x) * sum(self.scales)


class ScaledLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.factor = 0.5

    def forward(self, x):
        return super().forward(x) * self.factor


@forward(change=at(1, lambda model: setattr(model.stem, "factor", 2.0)), refused=REFUSED)
class NumberOfASubmodule(InARow):
    """a number of a submodule, read by it alone"""

    def __init__(self, parts):
        super().__init__(parts)
        self.stem = ScaledLinear()


@forward(change=at(1, lambda model: setattr(model, "_factor", 2.0)), refused=REFUSED)
class NumberBehindAProperty(Parts):
    """a number behind a property"""

    def __init__(self, parts):
        super().__init__(parts)
        self._factor = 0.5

    @property
    def factor(self):
        return self._factor * 2

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x) * self.factor


@forward(change=at(1, lambda model: setattr(model.config, "deep", True)), refused=REFUSED)
class BranchByANamespace(Configured):
    """a branch by a field of a namespace, through a variable, which is taken later"""

    def __init__(self, parts):
        super().__init__(parts)
        self.config = SimpleNamespace(deep=False)

    def forward(self, x):
        config = self.config
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
            if config.deep:
                x = x + torch.tanh(x)
        return self.head(x)


@forward(change=at(1, lambda model: model.table.__setitem__(0, False)), refused=REFUSED)
class BranchByAList(Configured):
    """a branch by an entry of a list, for each block"""

    def __init__(self, parts):
        super().__init__(parts)
        self.table = [True, False] * len(parts)

    def forward(self, x):
        x = self.stem(x)
        for i, part in enumerate(self.parts):
            if self.table[i]:
                x = torch.sin(x)
            x = part(x)
        return self.head(x)


@forward(change=at(1, lambda model: setattr(model, "deep", "no")), refused=REFUSED)
class BranchByAMethod(Configured):
    """a branch in a method, by a word"""

    def __init__(self, parts):
        super().__init__(parts)
        self.deep = "yes"

    def is_deep(self):
        return self.deep == "yes"

    def forward(self, x):
        x = self.stem(x)
        if self.is_deep():
            x = torch.tanh(self.extra(x))
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward(change=at(1, lambda model: setattr(model, "count", 1)), refused=r"count|number of rounds|range")
class NumberOfRounds(Parts):
    """the number of rounds of the loop"""

    def __init__(self, parts):
        super().__init__(parts)
        self.count = len(parts)

    def forward(self, x):
        x = self.stem(x)
        for i in range(self.count):
            x = self.parts[i](x)
        return self.head(x)


@forward(change=at(1, lambda model: setattr(model, "stem", lambda x: x * 2.0)), refused=r"stem")
class FunctionReplaced(InARow):
    """a function in an attribute, which is replaced"""

    def __init__(self, parts):
        super().__init__(parts)
        del self.stem
        self.stem = torch.sin


FACTORS = {"factor": 0.5}


def reset_global(step: int, model: Any) -> None:
    FACTORS["factor"] = 2.0 if step >= 1 else 0.5


@forward(change=reset_global, refused=r"FACTORS")
class EntryOfAGlobal(Parts):
    """an entry of a dictionary of the module"""

    def forward(self, x):
        x = self.stem(x) * FACTORS["factor"]
        for part in self.parts:
            x = part(x)
        return self.head(x)
