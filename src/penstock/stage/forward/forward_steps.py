"""A forward as steps, one after another: the code around the blocks, and one step for each block."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import nn

from penstock.errors import SplitError
from penstock.stage.forward.candidates import VALUE, Candidate, assign, candidate_in
from penstock.stage.forward.forward_source import read_source
from penstock.stage.forward.hoisting import Replaced
from penstock.stage.forward.iteration import UNKNOWN, constants, specialised, static_value
from penstock.stage.forward.liveness import assigned, own_returns
from penstock.stage.forward.module_uses import Frame, Uses, analyse
from penstock.stage.forward.no_blocks import no_blocks
from penstock.stage.layers import has_forward_hooks

LEAST_SHARE = 0.25
"""Parameters in a round of a loop, over those in a round of the largest loop, from which on the rounds are blocks, too."""


_Parallel = nn.DataParallel, nn.parallel.DistributedDataParallel


@dataclass
class Step:
    """Statements of one forward that run one after another.

    Attributes:
        frame: forward of the statements.
        statements: the statements, as a layer runs them.
        uses: what they use of the model.
        element: True if this is a block.
        keys: names among those of all frames of variables that belong to another one.
    """

    frame: Frame
    statements: list[ast.stmt]
    uses: Uses
    element: bool = False
    keys: dict[str, str] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Return the name of a variable among those of all frames."""
        return self.keys.get(name) or self.frame.key(name)


def new_frame(module: nn.Module, path: str = "", call: int = 0, outer: Frame | None = None) -> Frame:
    """Return the frame of a module's forward.

    Args:
        module: the module.
        path: name of the module in the model.
        call: number of the frame.
        outer: frame that calls it (default none).

    Raises:
        SplitError: if calling the module does more than its class's forward, or the forward has no usable source.
    """
    kind = type(module)
    owner = f"{kind.__name__}.forward"
    extras = {
        "a __call__ of its own": kind.__call__ is not nn.Module.__call__,
        "a forward that is not its class's": "forward" in vars(module),
        "hooks": has_forward_hooks(module),
        "been compiled": hasattr(module, "_orig_mod") or module._compiled_call_impl is not None,
    }
    if has := [name for name, there in extras.items() if there]:
        raise SplitError(
            f"cannot split {kind.__name__}: it has {' and '.join(has)}, which would be lost; give the plain model, and "
            "compile by execution=ExecutionOptions(compile='block')"
        )
    if issubclass(kind, _Parallel):
        raise SplitError(
            f"cannot split {kind.__name__}: it makes a model parallel in another way; give the model in it (model.module), "
            "and data parallelism by mesh=MeshShape(pp, dp)"
        )
    source = read_source(kind.forward, owner)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal | ast.Delete):
            word = type(node).__name__.lower()
            raise source.refusal(node, f"it has a {word} statement", "do without it")
        names = [getattr(node, key, None) for key in ("id", "attr", "arg")]
        if any(isinstance(n, str) and n.startswith("__") and not n.endswith("__") for n in names):
            raise source.refusal(node, "it uses a name that Python mangles (__name)", "use one underscore")
    arguments = source.tree.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    extra = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    names_of = {a.arg for a in (*every, *extra)} | assigned(source.tree.body)
    if not arguments.args or len(every) < 2:
        raise source.refusal(source.tree, "it takes no input", "let it take the batch as its first argument")
    return Frame(
        source,
        module,
        path,
        arguments.args[0].arg,
        frozenset(names_of),
        call,
        set() if outer is None else outer.decided,
    )


class Planner:
    """Finds the steps of a forward and of the forwards within it."""

    def __init__(self) -> None:
        self._calls = count(1)

    def steps(self, frame: Frame, facts: Mapping[str, Any]) -> list[Step]:
        """Return the steps of a forward.

        Args:
            frame: the forward.
            facts: known values of its parameters.

        Raises:
            SplitError: if it has no blocks, or it is not known which statements run before, between and after them.
        """
        body = list(frame.source.tree.body)
        if ast.get_docstring(frame.source.tree) is not None:
            body = body[1:]
        fixed = {name: value for name, value in facts.items() if name not in assigned(body)}
        fixed |= constants(frame, body, fixed)
        statements = specialised(frame, copy.deepcopy(body), fixed)
        chosen = self._chosen(frame, statements, fixed)
        steps: list[Step] = []
        begin = 0
        for candidate in chosen:
            steps += self._glue(frame, statements[begin : candidate.position])
            after = self._unroll(frame, statements[candidate.position], candidate, steps, fixed)
            statements[candidate.position : candidate.position + 1] = after
            begin = candidate.position
            for later in chosen:
                later.position += (later.position > candidate.position) * (len(after) - 1)
        return steps + self._glue(frame, statements[begin:])

    def _glue(self, frame: Frame, statements: list[ast.stmt]) -> list[Step]:
        return [Step(frame, *analyse(frame, statements))] if statements else []

    def _chosen(self, frame: Frame, statements: list[ast.stmt], facts: Mapping[str, Any]) -> list[Candidate]:
        found = [c for n, s in enumerate(statements) if (c := candidate_in(frame, n, s, facts)) is not None]
        found = [c for c in found if c.parameters]
        if not found:
            raise no_blocks(frame, statements, facts)
        main = max(found, key=lambda c: c.parameters)
        if main.inner is not None:
            return [main]
        return [c for c in found if c.inner is None and c.mean >= LEAST_SHARE * main.mean]

    def _unroll(
        self,
        frame: Frame,
        statement: ast.stmt,
        candidate: Candidate,
        steps: list[Step],
        facts: Mapping[str, Any],
    ) -> list[ast.stmt]:
        """Append the steps of the blocks; return the statement that remains after them, if one does."""
        call = candidate.call
        if call is None:
            for body in candidate.bodies:
                steps.append(Step(frame, *analyse(frame, body), element=True))
            return []
        number = next(self._calls)
        value = f"_penstock_value_{number}"
        if candidate.inner is None:
            (argument,) = call.args
            steps += self._glue(frame, [assign(value, argument, statement)])
            for body in candidate.bodies:
                bound = [_renamed(s, VALUE, value) for s in body]
                steps.append(Step(frame, *analyse(frame, bound), element=True))
        else:
            self._enter(frame, statement, candidate, steps, facts, number)
        Replaced(call, ast.Name(value, ast.Load())).visit(statement)
        return [statement]

    def _enter(
        self,
        frame: Frame,
        statement: ast.stmt,
        candidate: Candidate,
        steps: list[Step],
        facts: Mapping[str, Any],
        number: int,
    ) -> None:
        """Append the steps of a module whose forward has the blocks."""
        assert candidate.inner is not None
        assert candidate.call is not None
        inner = new_frame(candidate.inner, candidate.inner_path, number, frame)
        arguments = _arguments(frame, inner, candidate.call)
        values = {name: static_value(frame, node, facts) for name, node in arguments.items()}
        names = {name: f"_penstock_argument_{number}_{name}" for name in arguments}
        passed, uses = analyse(frame, [assign(names[n], node, statement) for n, node in arguments.items()])
        steps.append(Step(frame, passed, uses, keys={names[n]: inner.key(n) for n in arguments}))
        inside = self.steps(inner, {n: v for n, v in values.items() if v is not UNKNOWN})
        result, last = f"_penstock_value_{number}", inside[-1]
        if last.element or not isinstance(last.statements[-1], ast.Return):
            last = Step(inner, [ast.Return(ast.Constant(None))], Uses())
            inside.append(last)
        returned = last.statements[-1]
        assert isinstance(returned, ast.Return)
        last.statements[-1] = assign(result, returned.value or ast.Constant(None), statement)
        last.keys[result] = frame.key(result)
        require_no_return(inside)
        steps += inside


def _renamed(statement: ast.stmt, name: str, by: str) -> ast.stmt:
    """Return a copy of a statement with another name for a variable."""
    statement = copy.deepcopy(statement)
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id == name:
            node.id = by
    return statement


def require_no_return(steps: Sequence[Step]) -> None:
    """Check that no step ends the forward early.

    Raises:
        SplitError: if one may.
    """
    for step in steps:
        for node in own_returns(step.statements):
            raise step.frame.source.refusal(
                node,
                "it may return before its end, so that layers would be left out",
                "have one return, after the blocks",
            )


def _arguments(frame: Frame, inner: Frame, call: ast.Call) -> dict[str, ast.expr]:
    """Return the expression of every parameter of an inner forward."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        raise frame.source.refusal(call, "it passes on *args or **kwargs", "pass the arguments by name")
    signature = inspect.signature(inner.source.function)
    try:
        bound = signature.bind(None, *call.args, **{str(k.arg): k.value for k in call.keywords}).arguments
    except TypeError as error:
        raise frame.source.refusal(
            call, f"it calls {inner.source.owner} wrongly: {error}", "mend it"
        ) from None
    arguments: dict[str, ast.expr] = {}
    for n, (name, parameter) in enumerate(signature.parameters.items()):
        if n == 0 or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if n and name in bound:
                raise frame.source.refusal(call, f"it passes *{name}", "name the parameters")
            continue
        if name in bound:
            arguments[name] = bound[name]
        elif isinstance(parameter.default, bool | int | float | str | None):
            arguments[name] = ast.copy_location(ast.Constant(parameter.default), call)
        else:
            raise frame.source.refusal(call, f"it leaves {name} to its default", "pass it")
    return arguments
