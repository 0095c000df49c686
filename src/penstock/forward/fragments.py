"""Steps of a forward as functions, which take and return the values of variables by name."""

from __future__ import annotations

import ast
import copy
import dis
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from penstock.forward.forward_source import factory_of, function_named
from penstock.forward.forward_steps import Step
from penstock.forward.liveness import assigned, live_before, own_returns, surely_assigned


@dataclass
class Flow:
    """Variables of one step, by their names among the variables of all frames.

    Attributes:
        needs: variables whose values from before the step it may need.
        gives: variables of the step whose values later steps may need.
        surely: variables that it assigns in any case.
        live: variables from before the step that it or a later step may need.
    """

    step: Step
    needs: set[str] = field(default_factory=set)
    gives: set[str] = field(default_factory=set)
    assigns: set[str] = field(default_factory=set)
    surely: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Fragment:
    """A step as a function of the model and of variables.

    Attributes:
        function: ``function(module, *values)`` returns the new values, or, if `returns`, what the forward returns.
        returns: whether it is the end of the forward.
    """

    function: FunctionType
    path: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    returns: bool


def flows(steps: Sequence[Step], available: Iterable[str]) -> list[Flow]:
    """Return the variables that steps take from each other."""
    result = [Flow(step) for step in steps]
    live: set[str] = set()
    for flow in reversed(result):
        live = _fill(flow, live)
    defined = set(available)
    for flow in result:
        if missing := sorted(flow.needs - defined):
            raise flow.step.frame.source.refusal(
                flow.step.statements[0],
                f"the variable {missing[0].rpartition('.')[2]!r} may have no value here",
                "give it one on every path, as with `x = None` before the if",
            )
        defined |= flow.gives
    return result


def _fill(flow: Flow, after: set[str]) -> set[str]:
    step = flow.step
    names = _names(step)
    exposed = live_before(step.statements, set(), set()) & names
    maybe = assigned(step.statements)
    continues = any(True for _ in _continues(step.statements))
    certain = set() if continues else (surely_assigned(step.statements) or set())
    gives = {n for n in maybe if step.key(n) in after}
    flow.needs = {step.key(n) for n in exposed | (gives - certain)}
    flow.gives = {step.key(n) for n in gives}
    flow.assigns = {step.key(n) for n in maybe}
    flow.surely = {step.key(n) for n in certain}
    flow.live = (after - flow.surely) | flow.needs
    return flow.live


def _names(step: Step) -> set[str]:
    made = {
        n.id
        for s in step.statements
        for n in ast.walk(s)
        if isinstance(n, ast.Name) and n.id.startswith("_penstock_")
    }
    return made | step.frame.names - {step.frame.self_name}


def compiled(flow: Flow) -> Fragment:
    """Return a step as a function, compiled with the globals and free variables of its forward."""
    step, source = flow.step, flow.step.frame.source
    names = {step.key(n): n for n in sorted(_names(step) | assigned(step.statements))}
    takes, gives = sorted(flow.needs), sorted(flow.gives)
    returns = any(True for _ in own_returns(step.statements))
    end = ast.Return(ast.Tuple([ast.Name(names[key], ast.Load()) for key in gives], ast.Load()))
    body = [_Continued(end).visit(copy.deepcopy(s)) for s in step.statements]
    arguments = ast.arguments(
        posonlyargs=[],
        args=[ast.arg(n) for n in (step.frame.self_name, *(names[key] for key in takes))],
        kwonlyargs=[],
        kw_defaults=[],
        defaults=[],
    )
    definition = ast.FunctionDef(source.tree.name, arguments, [*body, end], [])
    ast.copy_location(definition, step.statements[0] if step.statements else source.tree)
    code = function_named(factory_of([ast.fix_missing_locations(definition)], source), source.tree.name)
    if lost := sorted(_global_names(code) & _names(step)):
        raise source.refusal(
            step.statements[0], f"{lost[0]!r} is used in a way that is not understood", "rename it"
        )
    original = source.function
    cells = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    function = FunctionType(
        code, original.__globals__, source.tree.name, None, tuple(cells[name] for name in code.co_freevars)
    )
    return Fragment(function, step.frame.path, tuple(takes), tuple(gives), returns)


def _global_names(code: CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_global_names(c) for c in code.co_consts if isinstance(c, CodeType)))


class _Continued(ast.NodeTransformer):
    """Statements of a loop's body with a return in place of its own ``continue``."""

    def __init__(self, end: ast.Return) -> None:
        self.end = end

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        return ast.fix_missing_locations(ast.copy_location(copy.deepcopy(self.end), node))

    def visit(self, node: ast.AST) -> Any:
        inner = isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.Lambda)
        return node if inner else super().visit(node)


def _continues(statements: Sequence[ast.stmt]) -> Iterable[ast.AST]:
    for statement in statements:
        if isinstance(statement, ast.Continue):
            yield statement
        elif not isinstance(statement, ast.For | ast.While | ast.FunctionDef):
            yield from _continues([s for s in ast.iter_child_nodes(statement) if isinstance(s, ast.stmt)])
