"""Expressions of a statement that can be evaluated before it, and trees with other nodes in place of some."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from typing import Any

from penstock.forward.liveness import inner_names


def hoistable(statement: ast.stmt) -> list[ast.expr]:
    """Return the expressions within a statement that can be evaluated before it, in the order in which Python does.

    To evaluate one of them before the statement, those before it in the list must be, too. Names, constants and attributes
    are left out: a call does not change them.
    """
    found: list[ast.expr] = []
    if any(isinstance(node, ast.NamedExpr) for node in ast.walk(statement)):
        return found  # moved, it would change a variable too early
    match statement:
        case ast.Assign(value=value) | ast.Expr(value=value) | ast.Return(value=ast.expr() as value):
            _collect(value, found)
        case ast.AnnAssign(value=ast.expr() as value) | ast.AugAssign(target=ast.Name(), value=value):
            _collect(value, found)
    return found


def _collect(node: ast.expr, found: list[ast.expr]) -> None:
    for part in _in_order(node):
        _collect(part, found)
    match node:
        case ast.Name() | ast.Constant() | ast.Slice() | ast.Starred() | ast.Call(ast.Name("super")):
            pass
        case ast.Attribute() | ast.Tuple() | ast.List() | ast.Dict() | ast.Subscript(_, ast.Constant()):
            pass
        case _:
            found.append(node)


def _in_order(node: ast.expr) -> list[ast.expr]:
    """Return the parts of an expression that are always evaluated, in their order."""
    match node:
        case ast.Call(function, arguments, keywords):
            base: ast.expr = function
            while isinstance(base, ast.Attribute | ast.Subscript):
                base = base.value
            named = isinstance(base, ast.Name)
            return [*([] if named else [function]), *arguments, *(k.value for k in keywords)]
        case ast.Attribute(value) | ast.Starred(value) | ast.UnaryOp(_, value):
            return [value]
        case ast.Subscript(value, part):
            return [value, part]
        case ast.Slice(low, high, step):
            return [part for part in (low, high, step) if part is not None]
        case ast.BinOp(left, _, right):
            return [left, right]
        case ast.Compare(left, _, others):
            # a < b < c does not evaluate c if a < b is false.
            return [left, others[0]]
        case ast.Tuple(parts) | ast.List(parts):
            return parts
        case ast.BoolOp(_, parts):
            return parts[:1]
        case ast.IfExp(test):
            return [test]
        case ast.Dict(keys, values):
            pairs = zip(keys, values, strict=True)
            return [part for pair in pairs for part in pair if part is not None]
    return []


class Replaced(ast.NodeTransformer):
    """A tree with another node in place of one."""

    def __init__(self, node: ast.expr, by: ast.expr) -> None:
        self.node, self.by = node, ast.copy_location(by, node)

    def visit(self, node: ast.AST) -> ast.AST:
        return self.by if node is self.node else super().visit(node)


class Substituted(ast.NodeTransformer):
    """A tree with expressions in place of variables."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values

    def visit(self, node: ast.AST) -> Any:
        hidden = inner_names(node) & self.values.keys()
        # Below this node the name means a variable of its own.
        if hidden:
            return Substituted({n: v for n, v in self.values.items() if n not in hidden}).generic_visit(node)
        return super().visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.values and isinstance(node.ctx, ast.Load):
            return _placed(copy.deepcopy(self.values[node.id]), node)
        return node


def _placed(tree: ast.expr, like: ast.AST) -> ast.expr:
    """Return an expression with the place of another node in its file, at every depth."""
    for node in ast.walk(tree):
        ast.copy_location(node, like)
    return tree
