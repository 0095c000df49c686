"""What one kind of layer is, and the list of all kinds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

WIDTH = 8
"""Every kind takes and returns a float tensor of shape (rows, WIDTH)."""

Build = TypeVar("Build", bound=Callable[[], Any])


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of layer.

    Attributes:
        name: unique.
        group: the file it stands in.
        what: in words.
        build: makes the layer, or a list of layers that follow one another.
        spans: other layers may stand between the first of these layers and the rest.
        bounded: why its gradients are not bit-equal to plain PyTorch's but within a bound; empty if they are.
        refused: a regular expression for the refusal, if the kind is refused; empty if it is not.
        when: where it is refused: "always"; "recompute"; "split" (of layers that hand over what they do); "tied"
            (of layers that the model calls at several places); "copies" (dp, or
            copies of a stage); "threads" (several of them); or one of two, with " or " between. It
            may also run and be right.
        rows: the fewest rows a microbatch must have in plain PyTorch.
        optimizers: those plain PyTorch can use; None for any.
        clip: whether plain PyTorch can clip its gradients.
        autocast: whether plain PyTorch can run it under autocast.
        writes: whether its forward writes into its weights.
        copies: whether copies of a stage are to give what plain PyTorch gives; if not, each copy has its own state, as the
            docs say, and it is not drawn with copies.
        mixes: whether rows depend on each other, as in plain accumulation; the check of that is left out then.
    """

    name: str
    group: str
    what: str
    build: Callable[[], nn.Module | list[nn.Module]]
    spans: bool = False
    bounded: str = ""
    refused: str = ""
    when: str = "always"
    rows: int = 1
    optimizers: tuple[str, ...] | None = None
    clip: bool = True
    autocast: bool = True
    writes: bool = False
    copies: bool = True
    mixes: bool = False


class Inner(nn.Module):
    """A layer with one linear layer in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)


class Layer(nn.Module):
    """A layer whose forward is a function of it and its input.

    Args:
        call: the function.
        parts: modules and parameters, by name; a tensor becomes a buffer.
    """

    def __init__(self, call: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


KINDS: dict[str, Kind] = {}

RECOMPUTE = {"refused": r"use recompute='none'", "when": "recompute"}
"""A forward that computes gradients needs what it saves, so it is refused under recompute."""

COPIES = {"refused": r"buffers=", "when": "copies"}
"""Where a stage has several copies, buffers that each of them changes in its own way are refused."""


def kind(**options: Any) -> Callable[[Build], Build]:
    """Enter a class without arguments, or a function that makes layers, under its name; the docstring says what it is."""

    def enter(build: Build) -> Build:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", build.__name__).lower()
        assert name not in KINDS, name
        what = (build.__doc__ or "").strip().splitlines()[0]
        group = build.__module__.rpartition(".")[2]
        KINDS[name] = Kind(name=name, group=group, what=what, build=build, **options)
        return build

    return enter
