"""Blocks of a forward: the rounds of a loop over modules, the modules of an ``nn.Sequential``, or a module that has them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.stage.forward.hoisting import Numbered, first_call
from penstock.stage.forward.iteration import rounds, specialised
from penstock.stage.forward.liveness import assigned
from penstock.stage.forward.module_uses import Frame, analyse, chain_value
from penstock.stage.layers import has_forward_hooks


@dataclass
class Candidate:
    """Statement that may run the blocks.

    Attributes:
        position: index of the statement in the forward.
        parameters: number of parameters in the blocks.
        bodies: statements of each block; empty if another module's forward has them.
        call: call of the ``nn.Sequential`` or of the other module; None for a loop.
        inner: the other module.
        inner_path: its name in the model.
    """

    position: int
    parameters: int
    bodies: list[list[ast.stmt]]
    call: ast.Call | None = None
    inner: nn.Module | None = None
    inner_path: str = ""

    @property
    def mean(self) -> float:
        """Parameters in a block."""
        return self.parameters / max(1, len(self.bodies))


VALUE = "_penstock_value"
"""Variable that goes through an ``nn.Sequential``."""


def assign(name: str, value: ast.expr, like: ast.AST) -> ast.stmt:
    """Return the statement ``name = value``, with the place of another node in its file."""
    statement = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), like)
    return ast.fix_missing_locations(statement)


def candidate_in(
    frame: Frame, position: int, statement: ast.stmt, facts: Mapping[str, Any]
) -> Candidate | None:
    """Return the blocks that a statement runs; None if it does not.

    Args:
        frame: forward of the statement.
        position: index of the statement.
        statement: the statement.
        facts: known values of variables.

    Raises:
        SplitError: if it runs blocks in a way that cannot be divided.
    """
    if isinstance(statement, ast.For):
        bodies = _bodies(frame, statement, facts)
        if bodies is None:
            return None
        return Candidate(position, _parameters(frame, bodies), bodies)
    modules: dict[int, tuple[nn.Module, str]] = {}

    def wanted(call: ast.Call) -> bool:
        known = chain_value(frame, call.func)
        if (
            known is None
            or not isinstance(known[0], nn.Module)
            or type(known[0]).__module__.startswith("torch.")
        ):
            plain = known is not None and type(known[0]) is nn.Sequential
            if not plain or known is None or len(known[0]) < 2 or len(call.args) != 1 or call.keywords:
                return False
        modules[id(call)] = known
        return any(True for _ in known[0].parameters())

    call = first_call(statement, wanted)
    if call is None:
        return None
    module, path = modules[id(call)]
    count_of = sum(p.numel() for p in {id(p): p for p in module.parameters()}.values())
    if type(module) is not nn.Sequential:
        return Candidate(position, count_of if _has_blocks(module) else 0, [], call, module, path)
    if has_forward_hooks(module):
        raise frame.source.refusal(
            call, "it calls an nn.Sequential with hooks, which would be lost", "remove them"
        )
    bodies = [
        [
            assign(
                VALUE,
                ast.Call(ast.Attribute(call.func, name, ast.Load()), [ast.Name(VALUE, ast.Load())], []),
                call,
            )
        ]
        for name in module._modules
    ]
    return Candidate(position, count_of, bodies, call)


def _has_blocks(module: nn.Module) -> bool:
    """Return whether a module may have blocks in its forward: a container, at some depth outside of torch's own modules."""
    return any(isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1 for m in module.children()) or any(
        _has_blocks(m) for m in module.children()
    )


def _bodies(frame: Frame, loop: ast.For, facts: Mapping[str, Any]) -> list[list[ast.stmt]] | None:
    """Return the statements of each round of a loop over modules; None if its rounds are not known."""
    values = rounds(frame, loop.iter, facts)
    if not values:
        return None
    bodies = []
    changed = assigned(loop.body)
    for value in values:
        value = copy.deepcopy(value)
        numbers = {n: v for n, v in _numbers(loop.target, value).items() if n not in changed}
        bind = ast.copy_location(ast.Assign([copy.deepcopy(loop.target)], value), loop)
        body = [Numbered(numbers).visit(copy.deepcopy(s)) for s in loop.body]
        bodies.append([ast.fix_missing_locations(bind), *specialised(frame, body, facts)])
    if not _parameters(frame, bodies[:1]) and not _parameters(frame, bodies):
        return None
    for node in ast.walk(ast.Module([*loop.body], [])):
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and not _in_inner_loop(loop, node)):
            word = "return" if isinstance(node, ast.Return) else "break"
            raise frame.source.refusal(
                node, f"a {word} leaves its loop over the blocks", "let every block run, and skip within it"
            )
    if loop.orelse:
        raise frame.source.refusal(loop, "its loop over the blocks has an else", "put that after the loop")
    return bodies


def _in_inner_loop(loop: ast.For, node: ast.AST) -> bool:
    inner = [n for s in loop.body for n in ast.walk(s) if isinstance(n, ast.For | ast.While)]
    return any(node is below for n in inner for below in ast.walk(n))


def _numbers(target: ast.expr, value: ast.expr) -> dict[str, int]:
    if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, int):
        return {target.id: value.value}
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        parts = [_numbers(t, v) for t, v in zip(target.elts, value.elts, strict=True)]
        return {name: number for part in parts for name, number in part.items()}
    return {}


def _parameters(frame: Frame, bodies: list[list[ast.stmt]]) -> int:
    """Return the number of parameters that some rounds use."""
    paths = {p for body in bodies for p in analyse(frame, copy.deepcopy(body))[1].paths}
    root = {id(p): p for path in paths for p in _tensors(frame, path)}
    return sum(p.numel() for p in root.values())


def _tensors(frame: Frame, path: str) -> list[nn.Parameter]:
    inner = path.removeprefix(f"{frame.path}.") if frame.path else path
    owner, _, last = inner.rpartition(".")
    module = frame.module.get_submodule(owner)
    if last in module._modules:
        return list(module.get_submodule(last).parameters())
    parameter = module._parameters.get(last)
    return [] if parameter is None else [parameter]
