"""Names that statements read, assign, surely assign, and need from before."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Assignment = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.FunctionDef | ast.Import | ast.ImportFrom
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def inner_names(node: ast.AST) -> set[str]:
    """Return the names that an inner function or a comprehension binds for itself; empty for any other node."""
    if isinstance(node, _Comprehension):
        return {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
    if isinstance(node, _Function):
        body = assigned(node.body) if isinstance(node.body, list) else set()
        return {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)} | body
    return set()


def reads(*nodes: ast.AST | None) -> set[str]:
    """Return the names whose values some nodes read, also within inner functions."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                names.add(node.id)
        elif isinstance(node, _Comprehension):
            names |= reads(node.generators[0].iter)
            names |= reads(*ast.iter_child_nodes(node)) - inner_names(node)
        elif isinstance(node, _Function):
            arguments = [a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)]
            names |= reads(node.args)
            names |= reads(*(node.body if isinstance(node.body, list) else [node.body])) - {*arguments}
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            names |= {node.target.id} | reads(node.value)
        elif node is not None:
            names |= reads(*ast.iter_child_nodes(node))
    return names


def assigned(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that some nodes may assign in their own scope."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Lambda):
            pass
        elif isinstance(node, _Comprehension):
            names |= {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}
        else:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.add(node.id)
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add((node.asname or node.name).partition(".")[0])
            names |= assigned(ast.iter_child_nodes(node))
    return names


def surely_assigned(statements: Sequence[ast.stmt]) -> set[str] | None:
    """Return the names that are assigned whenever some statements are run to their end; None if they never are."""
    names: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break):
            return None
        if isinstance(statement, ast.If):
            ends = [e for e in map(surely_assigned, (statement.body, statement.orelse)) if e is not None]
            if not ends:
                return None
            names |= set.intersection(*ends)
        elif isinstance(statement, ast.With):
            inner = surely_assigned(statement.body)
            if inner is None:
                return None
            names |= inner | assigned(i.optional_vars for i in statement.items if i.optional_vars)
        # `x: int` has no value and assigns nothing.
        elif isinstance(statement, _Assignment) and getattr(statement, "value", True) is not None:
            names |= assigned([statement])
    return names


def live_before(
    statements: Sequence[ast.stmt], after: set[str], on_continue: set[str] | None = None
) -> set[str]:
    """Return the names whose values from before some statements may be needed.

    Args:
        on_continue: names needed at a ``continue`` of an enclosing loop (default `after`).
    """
    onward = after if on_continue is None else on_continue
    live = set(after)
    for s in reversed(statements):
        match s:
            case ast.Return() | ast.Raise():
                live = reads(s)
            case ast.Continue():
                live = set(onward)
            case ast.If():
                branches = live_before(s.body, live, onward) | live_before(s.orelse, live, onward)
                live = branches | reads(s.test)
            case ast.For() | ast.While():
                head = reads(s.iter) if isinstance(s, ast.For) else reads(s.test)
                targets = assigned([s.target]) if isinstance(s, ast.For) else set()
                out = (
                    live | live_before(s.orelse, live, onward) | (head if isinstance(s, ast.While) else set())
                )
                # Two passes over the body are enough: the second one knows what the next round needs.
                again = out | (live_before(s.body, out, out) - targets)
                live = head | out | (live_before(s.body, again, again) - targets)
            case ast.With():
                targets = assigned(i.optional_vars for i in s.items if i.optional_vars)
                inner = live_before(s.body, live, onward) - targets
                live = inner | reads(*(i.context_expr for i in s.items))
            case ast.Try():
                # An exception may come before any assignment, so what is live after the statement stays live.
                inner = live_before([*s.body, *s.orelse, *s.finalbody], live, onward)
                handled = [live_before([*h.body, *s.finalbody], live, onward) for h in s.handlers]
                live = set.union(live, inner, *handled, reads(*(h.type for h in s.handlers)))
            case ast.Assign():
                names = {n.id for t in s.targets for n in _plain(t)}
                live = (live - names) | reads(s.value, *s.targets)
            case ast.AnnAssign():
                live = (live - {n.id for n in _plain(s.target)}) | reads(s.value, s.target)
            case ast.FunctionDef() | ast.Import() | ast.ImportFrom():
                live = (live - assigned([s])) | reads(s)
            case _:
                live = live | reads(s)
    return live


def _plain(target: ast.expr) -> list[ast.Name]:
    if isinstance(target, ast.Name):
        return [target]
    if isinstance(target, ast.Starred):
        return _plain(target.value)
    return [n for t in target.elts for n in _plain(t)] if isinstance(target, ast.Tuple | ast.List) else []


def own_returns(nodes: Iterable[ast.AST]) -> list[ast.Return]:
    """Return the return statements among some nodes and within them, but not within inner functions."""
    found: list[ast.Return] = []
    for node in nodes:
        if isinstance(node, ast.Return):
            found.append(node)
        elif not isinstance(node, _Function):
            found += own_returns(ast.iter_child_nodes(node))
    return found
