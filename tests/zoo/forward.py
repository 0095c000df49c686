"""What one forward of a model's own is, around layers of the zoo, and the list of all forwards."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.stage.named import names_given, names_taken
from tests.zoo.kind import KINDS, WIDTH

Make = TypeVar("Make", bound=Callable[[Any], Any])


def nothing(step: int, model: nn.Module) -> None:
    pass


def no_inputs(x: Tensor) -> dict[str, Tensor]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One forward, as people write it, around the layers of a case.

    Attributes:
        name: unique.
        group: the file it stands in.
        what: in words.
        build: makes the model of the layers.
        change: what a user does to the model before a step: the step's number, and the model.
        inputs: other inputs of the model, by name: of the whole batch.
        loss: "given", by the case; "method", the model's own ``loss``; or "own", its ``forward(x, y)`` returns it.
        bounded: why its gradients are not bit-equal to plain PyTorch's but within a bound; empty if they are.
        refused: a regular expression for the refusal, if it may be refused; empty if it must run.
    """

    name: str
    group: str
    what: str
    build: Callable[[list[nn.Module]], nn.Module]
    change: Callable[[int, Any], None] = nothing
    inputs: Callable[[Tensor], dict[str, Tensor]] = no_inputs
    loss: str = "given"
    bounded: str = ""
    refused: str = ""


FORWARDS: dict[str, Forward] = {}


def forward(**options: Any) -> Callable[[Make], Make]:
    """Enter a class whose argument are layers, or a function that makes a model of them; the docstring says what it is."""

    def enter(build: Make) -> Make:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", build.__name__).lower()
        assert name not in FORWARDS, name
        what = (build.__doc__ or "").strip().splitlines()[0]
        FORWARDS[name] = Forward(
            name=name, group=build.__module__.rpartition(".")[2], what=what, build=build, **options
        )
        return build

    return enter


class Parts(nn.Module):
    """A stem, layers and a head, without a forward."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(WIDTH, WIDTH)


class InARow(Parts):
    """The loop that most models have."""

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@cache
def fits(name: str) -> bool:
    """Whether a kind can stand in any forward: tensor in and out, nothing by name, no weight twice, nothing random."""
    kind = KINDS[name]
    if kind.spans or kind.bounded:
        return False
    with warnings.catch_warnings(), torch.random.fork_rng(()):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(1)
        made = kind.build()
        layers = made if isinstance(made, list) else [made]
        value = torch.randn(3, WIDTH, requires_grad=True) * 1.0
        before = torch.default_generator.get_state()
        for layer in layers:
            if names_taken(layer) or names_given(layer):
                return False
            try:
                value = layer(value)
            except Exception:
                return False
            if type(value) is not Tensor or value.shape != (3, WIDTH) or value.dtype != torch.float32:
                return False
        return torch.equal(before, torch.default_generator.get_state())
