"""Layer that runs some steps of a model's forward with the modules that these steps use, and no others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import PenstockError
from penstock.forward.fragments import Fragment
from penstock.stage.live import INTERNAL, live_copy
from penstock.stage.overlap import Watched, groups_of, require_unwritten
from penstock.stage.values import leaves_of


@dataclass(frozen=True)
class PieceCode:
    """Code of a layer.

    Attributes:
        takes: variables that it takes: the value itself if there is one, otherwise a dictionary.
        gives: variables that it returns, likewise; empty if it ends the forward.
    """

    fragments: tuple[Fragment, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    named: Mapping[str, Any] = field(default_factory=dict)

    def run(self, module: nn.Module, value: Any, named: Mapping[str, Any]) -> Any:
        """Run the steps."""
        values = dict(named)
        values.update({self.takes[0]: value} if len(self.takes) == 1 else value)
        watched = _watched(values, self.takes)
        for fragment in self.fragments:
            owner = module.get_submodule(fragment.path) if fragment.path else module
            result = fragment.function(owner, *[values[key] for key in fragment.takes])
            if fragment.returns:
                return result
            values.update(zip(fragment.gives, result, strict=True))
        require_unwritten(watched)
        _require_travels(values, self.gives)
        return values[self.gives[0]] if len(self.gives) == 1 else {key: values[key] for key in self.gives}


def _watched(values: Mapping[str, Any], keys: Sequence[str]) -> list[Watched]:
    """Return records of different tensors that share memory, in variables that travel together."""
    if len(keys) < 2 or torch.compiler.is_compiling():
        return []
    named = {id(x): (key, x) for key in keys for x in leaves_of(values[key]) if isinstance(x, Tensor)}
    groups = groups_of([x for _, x in named.values()], {})
    found = zip(named.values(), groups, strict=True)
    return [Watched.of(x, group, f"the variable {key!r}") for (key, x), group in found if group]


def _require_travels(values: Mapping[str, Any], keys: Sequence[str]) -> None:
    containers: dict[int, str] = {}
    for key in keys:
        value = values[key]
        if type(value) is Tensor:
            continue
        for leaf in leaves_of(value):
            if isinstance(leaf, nn.Parameter) or not isinstance(
                leaf, Tensor | None | bool | int | float | str
            ):
                raise PenstockError(
                    f"the variable {key!r} is or has a {type(leaf).__name__}, which cannot go on to a layer; compute it "
                    "again where it is used, as with x.device, and use weights and modules by their names (self.NAME)"
                )
        if isinstance(value, list | dict | set) and containers.setdefault(id(value), key) != key:
            raise PenstockError(
                f"the variables {containers[id(value)]!r} and {key!r} are one {type(value).__name__}, and would be two in "
                "the next layer; make a copy of it, or use one variable"
            )


def make_piece(
    model: nn.Module, code: PieceCode, paths: Iterable[str], attributes: set[tuple[str, str]]
) -> nn.Module:
    """Return a layer: a copy of the model that shares some of its modules, parameters and buffers, with another forward."""

    def forward(self: nn.Module, value: Any, /, **named: Any) -> Any:
        return code.run(self, value, {**defaults, **named})

    defaults = {name: value for name, value in code.named.items() if value is not inspect.Parameter.empty}
    # Names that no keyword input of a user has.
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
        for name in ("_penstock_self", "_penstock_value")
    ]
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in code.named.items()
    ]
    forward.__signature__ = inspect.Signature([*parameters, *named])  # type: ignore[attr-defined]
    owners = {f"{fragment.path}." for fragment in code.fragments if fragment.path}
    layer: nn.Module = trimmed(model, "", sorted({*paths, *owners}), attributes, forward)
    return layer


def trimmed(
    module: nn.Module,
    path: str,
    paths: list[str],
    attributes: set[tuple[str, str]],
    forward: Callable[..., Any] | None = None,
) -> Any:
    """Return a copy of a module with some of its modules, parameters and buffers, which are shared.

    Its mode and its plain attributes are the module's own, so that changes of them count from the next step on.

    Args:
        paths: names to keep, in the model; one with a dot behind it keeps the module without its members.
    """
    copied = live_copy(module, [name for owner, name in attributes if owner == path], forward=forward)
    of_torch = type(module).__module__.startswith("torch.")
    for name, value in vars(module).items():
        if name != "training" and (name in INTERNAL or of_torch):
            copied.__dict__[name] = (
                value.copy() if name in INTERNAL and isinstance(value, dict | set) else value
            )
    start = f"{path}." if path else ""
    inner = [p.removeprefix(start) for p in paths if p.startswith(start)]
    heads = {p.partition(".")[0] for p in inner}
    for member in ("_parameters", "_buffers"):
        copied.__dict__[member] = {n: t for n, t in vars(module)[member].items() if n in heads or t is None}
    copied.__dict__["_modules"] = {
        name: child if name in inner or child is None else trimmed(child, f"{start}{name}", paths, attributes)
        for name, child in module._modules.items()
        if name in heads or child is None
    }
    return copied
