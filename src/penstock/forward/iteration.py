"""Values that are known when a model is split: the rounds of a loop over its modules, and tests that never change."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from penstock.forward.hoisting import Substituted
from penstock.forward.module_uses import (
    Frame,
    container_length,
    is_plain_container,
    resolve,
    resolve_module,
)

UNKNOWN: Any = object()
"""A value that is not known when the model is split."""

GIVEN: Any = object()
"""A value that is not None, and otherwise unknown."""

# Every round becomes an expression of its own; a longer range counts something else than blocks.
MAX_ROUNDS = 10_000
_ARITHMETIC: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type, Any] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def static_value(frame: Frame, node: ast.expr, facts: Mapping[str, Any]) -> Any:
    """Return the value of an expression, or `UNKNOWN`."""

    def of(inner: ast.expr) -> Any:
        return static_value(frame, inner, facts)

    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return facts.get(name, UNKNOWN)
        case ast.Attribute() | ast.Subscript():
            link = resolve(frame, node)
            if link is None or link.kind not in ("plain", "module", "tensor", "constant"):
                return UNKNOWN
            if isinstance(link.node, ast.Constant):
                return link.node.value
            if isinstance(link.value, bool | int | float | str | None):
                return link.value
            return UNKNOWN if link.kind == "plain" else GIVEN
        case ast.Call() if (length := container_length(frame, node)) is not None:
            return length
        case ast.UnaryOp(ast.Not(), operand):
            truth = _truth(of(operand))
            return UNKNOWN if truth is UNKNOWN else not truth
        case ast.UnaryOp(ast.USub(), operand):
            value = of(operand)
            return -value if isinstance(value, int | float) else UNKNOWN
        case ast.BinOp(left, operation, right) if type(operation) in _ARITHMETIC:
            values = of(left), of(right)
            if not all(isinstance(v, int) for v in values) or (
                isinstance(operation, ast.FloorDiv | ast.Mod) and values[1] == 0
            ):
                return UNKNOWN
            return _ARITHMETIC[type(operation)](*values)
        case ast.Compare(left, [operation], [right]) if type(operation) in _COMPARISONS:
            return _compared(operation, of(left), of(right))
        case ast.BoolOp(operation, parts):
            # `or` ends at the first true part, `and` at the first false one.
            stop = isinstance(operation, ast.Or)
            truths = [_truth(of(part)) for part in parts]
            for truth in truths:
                if truth is UNKNOWN or truth is stop:
                    return truth
            return not stop
    return UNKNOWN


def _times_stored(frame: Frame, statements: list[ast.stmt]) -> Counter[str]:
    """Return how often each variable is set; parameters, and variables of inner functions, count once more."""
    nodes = [node for statement in (*statements, frame.source.tree.args) for node in ast.walk(statement)]
    stored = Counter(n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
    stored.update(n.arg for n in nodes if isinstance(n, ast.arg))
    return stored


def without_aliases(frame: Frame, statements: list[ast.stmt]) -> list[ast.stmt]:
    """Return statements with a module in place of each variable that is set once, before any branch, to that module.

    So ``base = self.m.model`` with ``for b in base.blocks`` becomes ``for b in self.m.model.blocks``.
    """
    stored = _times_stored(frame, statements)
    known: dict[str, ast.expr] = {}
    result: list[ast.stmt] = []
    for statement in statements:
        statement = Substituted(known).visit(statement)
        match statement:
            case ast.Assign([ast.Name(name)], value):
                pairs = [(name, value)]
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)) if len(names) == len(values):
                pairs = [
                    (n.id if isinstance(n, ast.Name) else "", v) for n, v in zip(names, values, strict=True)
                ]
            case _:
                pairs = []
        if pairs and all(stored[name] == 1 and resolve_module(frame, value) for name, value in pairs):
            known.update(pairs)
        else:
            result.append(statement)
    return result


def constants(frame: Frame, statements: list[ast.stmt], facts: Mapping[str, Any]) -> dict[str, int]:
    """Return the whole numbers of variables that are set once, before any branch, such as ``n = len(self.blocks)``."""
    stored = _times_stored(frame, statements)
    known: dict[str, int] = {}
    for statement in statements:
        match statement:
            case ast.Assign([ast.Name(name)], value) if stored[name] == 1:
                number = static_value(frame, value, {**facts, **known})
                if type(number) is int:
                    known[name] = number
    return known


def _truth(value: Any) -> Any:
    return UNKNOWN if value is UNKNOWN or value is GIVEN else bool(value)


def _compared(operation: ast.cmpop, left: Any, right: Any) -> Any:
    if left is UNKNOWN or right is UNKNOWN:
        return UNKNOWN
    identity = isinstance(operation, ast.Is | ast.IsNot)
    if left is GIVEN or right is GIVEN or identity:
        none = left is None or right is None
        # GIVEN says only that a value is not None, and constants may be other objects when the layers run.
        if not (identity and none):
            return UNKNOWN
        return (left is right) is isinstance(operation, ast.Is)
    try:
        return bool(_COMPARISONS[type(operation)](left, right))
    except TypeError:
        return UNKNOWN


def specialised(frame: Frame, statements: list[ast.stmt], facts: Mapping[str, Any]) -> list[ast.stmt]:
    """Return statements with the branch in place of every ``if`` whose test is known, as deep as only such tests reach."""
    result: list[ast.stmt] = []
    for statement in statements:
        if isinstance(statement, ast.If):
            truth = _truth(static_value(frame, statement.test, facts))
            if truth is not UNKNOWN:
                result += specialised(frame, statement.body if truth else statement.orelse, facts)
                if result and isinstance(result[-1], ast.Return | ast.Raise):
                    return result
                continue
        result.append(statement)
        if isinstance(statement, ast.Return):
            return result
    return result


def rounds(frame: Frame, node: ast.expr, facts: Mapping[str, Any]) -> list[ast.expr] | None:
    """Return an expression for the loop variable in each round of a loop over an iterable; None if they are not known.

    Args:
        node: the iterable: a container of modules, a slice of one, ``range``, ``enumerate``, ``zip``, ``reversed`` or
            ``list`` of these.
    """
    match node:
        case ast.Call(ast.Name(name), arguments, keywords) if frame.is_builtin(name):
            return _of_call(frame, name, arguments, keywords, facts)
        case ast.Call(ast.Attribute(container, "values" | "items" as kind), [], []):
            known = resolve_module(frame, container)
            if known is None or not isinstance(known[0], nn.ModuleDict) or not is_plain_container(known[0]):
                return None
            children = [(name, _child(container, name)) for name in known[0]._modules]
            return [c if kind == "values" else _tuple(ast.Constant(n), c) for n, c in children]
        case ast.Subscript(container, ast.Slice() as part):
            whole = rounds(frame, container, facts)
            ends = [
                None if e is None else static_value(frame, e, facts)
                for e in (part.lower, part.upper, part.step)
            ]
            if whole is None or not all(e is None or isinstance(e, int) for e in ends) or ends[2] == 0:
                return None
            return whole[slice(*ends)]
        case ast.Attribute() | ast.Subscript():
            known = resolve_module(frame, node)
            if known is not None and is_plain_container(known[0]) and not isinstance(known[0], nn.ModuleDict):
                return [_child(node, name) for name in (*known[0]._modules, *known[0]._parameters)]
    return None


def _of_call(
    frame: Frame, name: str, arguments: list[ast.expr], keywords: list[ast.keyword], facts: Mapping[str, Any]
) -> list[ast.expr] | None:
    if name == "range" and not keywords:
        values = [static_value(frame, a, facts) for a in arguments]
        if not all(type(v) is int for v in values) or (len(values) == 3 and values[2] == 0):
            return None
        numbers = range(*values)
        return [ast.Constant(n) for n in numbers] if len(numbers) <= MAX_ROUNDS else None
    if name not in ("enumerate", "zip", "reversed", "list", "tuple"):
        return None
    start = 0
    if name == "enumerate":
        starts = [*arguments[1:], *(k.value for k in keywords if k.arg == "start")]
        start = static_value(frame, starts[0], facts) if starts else 0
        arguments = arguments[:1]
        if type(start) is not int:
            return None
    elif any(k.arg != "strict" for k in keywords):
        return None
    inner = [rounds(frame, a, facts) for a in arguments]
    known = [r for r in inner if r is not None]
    if not known or len(known) < len(inner):
        return None
    if name == "enumerate":
        return [_tuple(ast.Constant(n), value) for n, value in enumerate(known[0], start)]
    if name == "zip":
        if keywords and len({len(r) for r in known}) > 1:
            return None
        return [_tuple(*values) for values in zip(*known, strict=False)]
    return known[0][::-1] if name == "reversed" else known[0]


def _child(container: ast.expr, name: str) -> ast.expr:
    return ast.Attribute(container, name, ast.Load())


def _tuple(*values: ast.expr) -> ast.expr:
    return ast.Tuple([*values], ast.Load())
