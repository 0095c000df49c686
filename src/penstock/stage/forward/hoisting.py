"""Calls that a statement makes before anything else that could matter, so that they can be made before the statement."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from penstock.stage.forward.liveness import inner_names


def first_call(statement: ast.stmt, wanted: Callable[[ast.Call], bool]) -> ast.Call | None:
    """Return a wanted call within a statement, if all that is evaluated before it are names, constants and attributes."""
    match statement:
        case ast.Assign(value=value) | ast.Expr(value=value) | ast.Return(value=ast.expr() as value):
            return _first(value, wanted)
        case ast.AnnAssign(value=ast.expr() as value) | ast.AugAssign(target=ast.Name(), value=value):
            return _first(value, wanted)
    return None


def _first(node: ast.expr, wanted: Callable[[ast.Call], bool]) -> ast.Call | None:
    if isinstance(node, ast.Call) and wanted(node):
        return node
    for part in _in_order(node):
        if not _is_simple(part):
            return _first(part, wanted)
    return None


def _in_order(node: ast.expr) -> list[ast.expr]:
    """Return the parts of an expression that are always evaluated, in their order."""
    match node:
        case ast.Call(function, arguments, keywords):
            return [function, *arguments, *(k.value for k in keywords)]
        case ast.Attribute(value) | ast.Starred(value) | ast.NamedExpr(_, value) | ast.UnaryOp(_, value):
            return [value]
        case ast.Subscript(value, part):
            return [value, part]
        case ast.BinOp(left, _, right):
            return [left, right]
        case ast.Compare(left, _, others):
            return [left, others[0]]
        case ast.Tuple(parts) | ast.List(parts):
            return parts
        case ast.BoolOp(_, parts):
            return parts[:1]
        case ast.IfExp(test):
            return [test]
        case ast.Dict(keys, values) if all(isinstance(k, ast.Constant) for k in keys):
            return values
    return []


def _is_simple(node: ast.expr) -> bool:
    match node:
        case ast.Name() | ast.Constant():
            return True
        case ast.Attribute(value):
            return _is_simple(value)
        case ast.Subscript(value, part):
            return _is_simple(value) and _is_simple(part)
    return False


class Replaced(ast.NodeTransformer):
    """A tree with another node in place of one.

    Args:
        node: node to replace, by identity.
        by: node to put there.
    """

    def __init__(self, node: ast.expr, by: ast.expr) -> None:
        self.node, self.by = node, ast.copy_location(by, node)

    def visit(self, node: ast.AST) -> ast.AST:
        return self.by if node is self.node else super().visit(node)


class Numbered(ast.NodeTransformer):
    """A tree with a number in place of a variable.

    Args:
        values: numbers by the variable's name.
    """

    def __init__(self, values: dict[str, int]) -> None:
        self.values = values

    def visit(self, node: ast.AST) -> Any:
        hidden = inner_names(node) & self.values.keys()
        if hidden:
            return Numbered({n: v for n, v in self.values.items() if n not in hidden}).generic_visit(node)
        return super().visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.values and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(self.values[node.id]), node)
        return node
