"""Grouping of a forward's steps into layers: each runs its steps, with the modules that they use and no others."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import PenstockError, SplitError
from penstock.forward.fragments import Flow, Fragment, compiled
from penstock.forward.module_uses import is_constant, resolve_module
from penstock.stage.layers import INTERNAL, Layer, Role, joint_name, live_copy
from penstock.stage.memory_groups import Watched, groups_of, require_unwritten
from penstock.stage.named import names_taken
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
    # Inspect reads it from any function.
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


@dataclass
class Piece:
    """Steps that make up one layer."""

    flows: list[Flow]
    role: Role
    paths: set[str] = field(default_factory=set)
    owned: list[str] = field(default_factory=list)

    @property
    def attributes(self) -> set[tuple[str, str]]:
        """Plain attributes that the steps use."""
        return {a for flow in self.flows for a in flow.step.uses.attributes}


def grouped(flows: Sequence[Flow]) -> list[Piece]:
    """Group steps into layers: the code before the first block, each block with the code after it, and the end."""
    blocks = [n for n, flow in enumerate(flows) if flow.step.element]
    first, last = blocks[0], blocks[-1]
    pieces = [Piece(list(flows[:first]), "embedding")] if first else []
    for n, flow in enumerate(flows[first : last + 1]):
        if flow.step.element or not n:
            pieces.append(Piece([flow], "block"))
        else:
            pieces[-1].flows.append(flow)
    if rest := list(flows[last + 1 :]):
        pieces.append(Piece(rest, "head"))
    for piece in pieces:
        piece.paths = {path for flow in piece.flows for path in flow.step.uses.paths}
    return pieces


def assign_owners(model: nn.Module, pieces: Sequence[Piece]) -> None:
    """Say which layer has each module, parameter and buffer first; unused ones belong to the last layer."""
    _widen(pieces)
    _require_separate_objects(pieces)
    _require_separate_containers(model, pieces)
    owned: set[str] = set()
    place = {name: n for n, name in enumerate(_names(model))}
    for piece in pieces:
        piece.owned = sorted((p for p in piece.paths if not _within(p, owned)), key=lambda p: place[p])
        owned |= {*piece.owned}
    rest = _unused(model, owned)
    pieces[-1].owned += rest
    pieces[-1].paths |= {*rest}


def _names(model: nn.Module) -> list[str]:
    """Return the names of all modules, parameters and buffers, in the model's order."""
    return [
        f"{name}.{inner}" if name and inner else name or inner
        for name, module in model.named_modules(remove_duplicate=False)
        for inner in ("", *module._parameters, *module._buffers)
    ]


def _within(path: str, others: set[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:n]) in others for n in range(1, len(parts) + 1))


def _widen(pieces: Sequence[Piece]) -> None:
    """Where one layer uses a module and another one a part of it, give the module to both."""
    modules = {path for piece in pieces for path in piece.paths}
    for piece in pieces:
        for path in sorted(piece.paths):
            parts = path.split(".")
            wider = next((w for n in range(1, len(parts)) if (w := ".".join(parts[:n])) in modules), None)
            if wider is None:
                continue
            if piece.role == "block":
                other = next(p for p in pieces if wider in p.paths)
                step = next(f.step for f in other.flows if wider in f.step.uses.paths)
                raise step.frame.source.refusal(
                    step.statements[0],
                    f"the code here uses self.{wider} as a whole, and self.{path} is a block of it, which is another layer",
                    "use single modules by name",
                )
            piece.paths = (piece.paths - {path}) | {wider}


def _require_separate_objects(pieces: Sequence[Piece]) -> None:
    seen: dict[int, Piece] = {}
    for piece in pieces:
        for flow in piece.flows:
            for path, node in flow.step.uses.members.items():
                if any(path in other.paths for other in pieces if other is not piece):
                    raise flow.step.frame.source.refusal(
                        node,
                        f"it uses an attribute or a method of self.{path}, which other layers call: what a call changes "
                        "in it would not be seen here",
                        f"let self.{path} return what is needed, and pass it on in a variable",
                    )
            for key, (path, node) in flow.step.uses.objects.items():
                if seen.setdefault(key, piece) is not piece:
                    raise flow.step.frame.source.refusal(
                        node,
                        f"it hands on self.{path}, an object whose state layers on other ranks would not see",
                        "take single values out of it (self.NAME.VALUE)",
                    )


def _require_separate_containers(model: nn.Module, pieces: Sequence[Piece]) -> None:
    """Refuse modules of different layers that hold one list, dictionary or set, through which values could pass."""
    seen: dict[int, tuple[Piece, str]] = {}
    for piece in pieces:
        for path in sorted(piece.paths):
            owner, _, last = path.rpartition(".")
            top = model.get_submodule(owner)._modules.get(last)
            for inner, module in () if top is None else top.named_modules(prefix=path):
                for name, value in vars(module).items():
                    mutable = isinstance(value, list | dict | set) and name not in INTERNAL
                    if not mutable or is_constant(value):
                        continue
                    first, other = seen.setdefault(id(value), (piece, f"{inner}.{name}"))
                    if first is not piece and other != f"{inner}.{name}":
                        raise SplitError(
                            f"cannot split a {type(model).__name__}: {other} and {inner}.{name} are one "
                            f"{type(value).__name__}, which layers on other ranks could not share; pass values on as "
                            "arguments and results"
                        )


def _unused(model: nn.Module, owned: set[str]) -> list[str]:
    """Return the modules, parameters and buffers that no layer has, as few names as possible."""
    names = [n for n, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    unused: dict[str, None] = {}
    for name in names:
        if _within(name, owned):
            continue
        parts = name.split(".")
        taken = {".".join(o.split(".")[:n]) for o in owned for n in range(1, o.count(".") + 2)}
        unused[next(p for n in range(1, len(parts) + 1) if (p := ".".join(parts[:n])) not in taken)] = None
    return list(unused)


def changed_before(pieces: Sequence[Piece], number: int) -> set[str]:
    """Return the variables that layers before one may assign."""
    return {key for piece in pieces[:number] for flow in piece.flows for key in flow.assigns}


def carried(flow: Flow, changed: set[str], named: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the variables that travel to a step: those that it or a later one needs, without keyword inputs."""
    return tuple(sorted(key for key in flow.live if key not in named or key in changed))


def as_layer(
    model: nn.Module,
    pieces: Sequence[Piece],
    number: int,
    named: Mapping[str, Any],
    takes: tuple[str, ...],
    gives: tuple[str, ...],
) -> Layer:
    piece = pieces[number]
    module = _plain_block(model, piece, takes, gives)
    if module is not None:
        return Layer(piece.owned[0], lambda: module, piece.role, module=module)
    changed = changed_before(pieces, number)
    wanted = {key for flow in piece.flows for key in flow.needs} | {*gives}
    inputs = {name: default for name, default in named.items() if name in wanted and name not in changed}
    code = PieceCode(tuple(compiled(flow) for flow in piece.flows), takes, gives, inputs)
    layer = make_piece(model, code, piece.paths, piece.attributes)
    return Layer(joint_name(piece.owned, number), lambda: layer, piece.role, module=layer)


def _plain_block(
    model: nn.Module, piece: Piece, takes: tuple[str, ...], gives: tuple[str, ...]
) -> nn.Module | None:
    """Return the block itself if the layer does nothing but call it on the one value; otherwise None."""
    if len(piece.flows) != 1 or len(piece.owned) != 1 or piece.paths != {*piece.owned} or takes != gives:
        return None
    step, function = piece.flows[0].step, None
    match step.statements:
        case [
            ast.Assign([ast.Name(block)], _),
            ast.Assign([ast.Name(x)], ast.Call(called, [ast.Name(y)], [])),
        ] if x == y != block:
            function = called
        case [ast.Assign([ast.Name(x)], ast.Call(called, [ast.Name(y)], []))] if x == y:
            function = called
    if function is None or takes != (step.key(x),):
        return None
    known = resolve_module(step.frame, function)
    if known is None or known[1] != piece.owned[0] or type(known[0]).__call__ is not nn.Module.__call__:
        return None
    return None if names_taken(known[0]) else known[0]
