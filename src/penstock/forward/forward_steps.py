"""A forward as steps, one after another: the code around the blocks, and one step for each block."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from penstock.forward.candidates import (
    LEAST_SHARE,
    BlockFinder,
    Candidate,
    Plan,
    assign,
    part_of,
    refused_return,
)
from penstock.forward.hoisting import Replaced
from penstock.forward.liveness import own_returns
from penstock.forward.module_uses import Frame, Uses, analyse


@dataclass
class Step:
    """Statements of one forward that run one after another.

    Attributes:
        keys: for variables that belong to another frame, their names among the variables of all frames.
    """

    frame: Frame
    statements: list[ast.stmt]
    uses: Uses
    element: bool = False
    keys: dict[str, str] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Return the name of a variable among the variables of all frames."""
        return self.keys.get(name) or self.frame.key(name)


def steps_of(frame: Frame, facts: Mapping[str, Any]) -> list[Step]:
    """Return the steps of a forward and of the forwards and methods in it that have blocks."""
    finder = BlockFinder()
    plan, main = finder.chosen(frame, facts)
    steps = _Steps(finder).of_plan(plan)
    blocks = [n for n, step in enumerate(steps) if step.element]
    first, last = blocks[0], blocks[-1]
    least = LEAST_SHARE * main.mean
    between = [part for step in steps[first:last] for part in _with_lone_blocks(step, least)]
    return [*steps[:first], *between, *steps[last:]]


class _Steps:
    """Makes the steps of plans."""

    def __init__(self, finder: BlockFinder) -> None:
        self._numbers = finder.numbers

    def of_plan(self, plan: Plan) -> list[Step]:
        """Return the steps of a forward or a method whose blocks are chosen."""
        frame, steps, waiting = plan.frame, list[Step](), list[ast.stmt]()

        def flush() -> None:
            if waiting:
                steps.append(Step(frame, *analyse(frame, waiting)))
                waiting.clear()

        for statement, candidates in plan.rows:
            if isinstance(statement, ast.For) and candidates and not candidates[0].chosen:
                waiting += candidates[0].code(statement)
                continue
            chosen = [n for n, c in enumerate(candidates) if c.chosen]
            remains: ast.stmt | None = statement
            for candidate in candidates[: chosen[-1] + 1 if chosen else 0]:
                call = candidate.call
                if call is None:
                    remains = None
                    flush()
                    steps += self._rounds(candidate)
                    continue
                value = candidate.value or f"_penstock_value_{next(self._numbers)}"
                if not candidate.chosen:
                    waiting.append(assign(value, call, statement))
                elif candidate.within is not None:
                    flush()
                    steps += self._entered(frame, candidate, candidate.within, value, statement)
                else:
                    assert isinstance(call, ast.Call)
                    if isinstance(statement, ast.Assign) and statement.value is call and value in frame.names:
                        remains = None
                    match call.args[0]:
                        case ast.Name(name) if name == value:
                            pass
                        case argument:
                            waiting.append(assign(value, argument, statement))
                    flush()
                    steps += self._rounds(candidate)
                # The statement, and arguments of calls later in it, may have this call within them.
                by = Replaced(call, ast.Name(value, ast.Load()))
                by.visit(statement)
                for later in candidates:
                    # The visitor puts an expression in the place of an expression.
                    later.arguments = {name: by.visit(node) for name, node in later.arguments.items()}  # type: ignore[misc]
            if remains is not None:
                waiting.append(remains)
        flush()
        return steps

    def _rounds(self, candidate: Candidate) -> list[Step]:
        """Return the steps of the rounds of a loop or an ``nn.Sequential``."""
        if candidate.has_stages:
            return [step for plan in candidate.rounds for step in self.of_plan(plan)]
        return [
            Step(plan.frame, *analyse(plan.frame, plan.statements), element=True) for plan in candidate.rounds
        ]

    def _entered(
        self, frame: Frame, candidate: Candidate, within: Plan, value: str, statement: ast.stmt
    ) -> list[Step]:
        """Return the steps of a forward or method that a call runs, from its arguments to its result in a variable."""
        inner, steps = within.frame, list[Step]()
        own = {name: node for name, node in candidate.arguments.items() if name not in inner.shared}
        if own:
            names = {name: f"{value}_{name}" for name in own}
            passed = [assign(names[name], node, statement) for name, node in own.items()]
            steps.append(
                Step(frame, *analyse(frame, passed), keys={names[name]: inner.key(name) for name in own})
            )
        inside = self.of_plan(within)
        last = inside[-1]
        if last.element or not isinstance(last.statements[-1], ast.Return):
            # A forward without a return at its end returns None.
            nothing = ast.copy_location(ast.Return(ast.Constant(None)), statement)
            last = Step(inner, [nothing], Uses())
            inside.append(last)
        returned = last.statements[-1]
        assert isinstance(returned, ast.Return)
        last.statements[-1] = assign(value, returned.value or ast.Constant(None), returned)
        last.keys[value] = frame.key(value)
        return steps + inside


def _with_lone_blocks(step: Step, least: float) -> list[Step]:
    """Divide code between blocks where a statement has as many parameters as a block."""
    if step.element:
        return [step]
    parts: list[tuple[bool, list[ast.stmt]]] = []
    for statement in step.statements:
        modules = [part_of(step.frame, p) for p in analyse(step.frame, [copy.deepcopy(statement)])[1].paths]
        size = sum(p.numel() for m in modules if isinstance(m, nn.Module) for p in m.parameters())
        if size >= least or not parts:
            parts.append((size >= least, []))
        parts[-1][1].append(statement)
    return [Step(step.frame, *analyse(step.frame, p), element, step.keys) for element, p in parts]


def require_no_return(steps: Sequence[Step]) -> None:
    """Check that no step ends the forward early."""
    for step in steps:
        for node in own_returns(step.statements):
            raise refused_return(step.frame, node)
