"""Blocks of a forward: rounds of loops over modules and modules of an ``nn.Sequential``, in it and in what it calls."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

from torch import nn

from penstock.base.errors import SplitError
from penstock.forward.frames import arguments_of, forward_frame, method_called, method_frame
from penstock.forward.hoisting import Substituted, hoistable
from penstock.forward.iteration import UNKNOWN, constants, rounds, specialised, static_value, without_aliases
from penstock.forward.liveness import assigned, live_before, own_returns
from penstock.forward.module_uses import Frame, analyse, calls_its_forward, resolve_module
from penstock.stage.layers import has_forward_hooks

# Vision models with stages, such as ResNet and Swin, have four or five; deep models have a dozen blocks or more.
MOST_STAGES = 8
"""Rounds of a loop from which on they are blocks, and are not divided into smaller ones."""

LEAST_SHARE = 0.25
"""Parameters in a round of a loop, over those in a round of the largest loop, from which on the rounds are blocks, too."""


@dataclass(kw_only=True)
class Candidate:
    """A loop or a call that may run blocks; or another expression, which must be evaluated before them.

    Attributes:
        call: the call or expression; None for a loop.
        value: variable that goes through an ``nn.Sequential``; empty for anything else.
        chosen: whether it is divided; for `within`, whether anything in it is.
    """

    parameters: int
    modules: list[nn.Module] = field(default_factory=list)
    rounds: list[Plan] = field(default_factory=list)
    call: ast.expr | None = None
    value: str = ""
    within: Plan | None = None
    arguments: dict[str, ast.expr] = field(default_factory=dict)
    refused: SplitError | None = None
    chosen: bool = False

    @property
    def mean(self) -> float:
        """Parameters in a block."""
        return self.parameters / max(1, len(self.rounds))

    @property
    def depth(self) -> int:
        """Number of modules with parameters."""
        return sum(any(True for _ in m.parameters()) for m in self.modules)

    @property
    def is_stack(self) -> bool:
        """True for a loop, and for an ``nn.Sequential`` of modules that are made of others, as blocks are."""
        return not self.value or any(m._modules for m in self.modules)

    @property
    def kinds(self) -> set[type[nn.Module]]:
        """Classes of its modules, without torch's own."""
        return {type(m) for m in self.modules if not type(m).__module__.startswith("torch.")}

    @cached_property
    def has_stages(self) -> bool:
        """True if its rounds are stages: few, and most of what is in them are chains of modules that are made of others."""
        if len(self.rounds) > MOST_STAGES:
            return False
        chains = [c for plan in self.rounds for c in plan.leaves() if c.refused is None and c.is_chain]
        return 2 * sum(c.parameters for c in chains) >= self.parameters > 0

    @property
    def is_chain(self) -> bool:
        """True if each of its modules is made of others, and takes what the one before returned."""
        first = [s for plan in self.rounds[:1] for s, _ in plan.rows]
        passed = [
            isinstance(s.value.func, ast.Attribute) and s.targets[0].id == s.value.args[0].id
            for s in first
            if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)
            if isinstance(s.value, ast.Call) and s.value.args and isinstance(s.value.args[0], ast.Name)
        ]
        return any(passed) and any(m._modules for m in self.modules)

    def code(self, loop: ast.For) -> list[ast.stmt]:
        """Return the statements of a loop that is not divided: its rounds one after another, where these are the same."""
        same = self.refused is None and not any(isinstance(n, ast.Continue) for n in ast.walk(loop))
        return [s for plan in self.rounds for s in plan.statements] if same else [loop]

    @property
    def parts(self) -> list[Plan]:
        """Forward that it calls, or its stages: what is divided in its place; empty if its rounds are blocks."""
        if self.within is not None:
            return [self.within]
        return self.rounds if self.has_stages else []

    def leaves(self) -> list[Candidate]:
        """Return the loops and calls of ``nn.Sequential`` in it, or itself if it is one."""
        return [leaf for plan in self.parts for leaf in plan.leaves()] or [self]

    def choose(self, leaves: set[int]) -> None:
        """Mark it as chosen if it is, or has, one of some leaves, given by id."""
        inner = [c for plan in self.parts for c in plan.candidates]
        for candidate in inner:
            candidate.choose(leaves)
        self.chosen = any(c.chosen for c in inner) if self.parts else id(self) in leaves


@dataclass
class Plan:
    """Statements of a forward or a method, each with the loops and calls in it that may run blocks."""

    frame: Frame
    rows: list[tuple[ast.stmt, list[Candidate]]] = field(default_factory=list)

    @property
    def statements(self) -> list[ast.stmt]:
        return [statement for statement, _ in self.rows]

    @property
    def candidates(self) -> list[Candidate]:
        return [c for _, found in self.rows for c in found]

    def leaves(self) -> list[Candidate]:
        """Return the loops and calls of ``nn.Sequential`` in it and in what it calls."""
        return [leaf for c in self.candidates for leaf in c.leaves()]


class BlockFinder:
    """Finds the blocks of a forward, and of forwards and methods that it calls."""

    def __init__(self) -> None:
        self.numbers = count(1)
        self._prefixes: Counter[str] = Counter()
        self._open: list[tuple[int, object]] = []

    def chosen(self, frame: Frame, facts: Mapping[str, Any]) -> tuple[Plan, Candidate]:
        """Return a forward with its blocks chosen, and the loop or call that has most of the model's parameters.

        The blocks are the rounds of that one, and of each that has similar rounds: of LEAST_SHARE of the parameters, of the
        same class, or as many. The layers of an ``nn.Sequential``, as in a stem or a classifier, are blocks only
        if loops and sequences of modules with children have less than LEAST_SHARE of the parameters.
        """
        plan = self.plan(frame, facts)
        leaves = plan.leaves()
        refused = [leaf for leaf in leaves if leaf.refused is not None]
        usable = [leaf for leaf in leaves if leaf.refused is None and leaf.parameters]
        largest = max(refused, key=lambda c: c.parameters, default=None)
        if not usable:
            if largest is not None and largest.refused is not None:
                raise largest.refused
            raise no_blocks(frame, plan.statements, facts)
        stacks = [leaf for leaf in usable if leaf.is_stack]
        if sum(c.parameters for c in stacks) < LEAST_SHARE * sum(c.parameters for c in usable):
            stacks = usable
        main = max(stacks, key=lambda c: c.parameters)
        like = [c for c in usable if c is main or _is_like(c, main)]
        if largest is not None and largest.refused and largest.parameters > sum(c.parameters for c in like):
            raise largest.refused
        ids = {id(c) for c in like}
        for candidate in plan.candidates:
            candidate.choose(ids)
        return plan, main

    def plan(self, frame: Frame, facts: Mapping[str, Any]) -> Plan:
        """Return the statements of a forward or method, with the loops and calls that may run blocks."""
        self._open.append((id(frame.module), frame.source.function))
        body = list(frame.source.tree.body)
        if ast.get_docstring(frame.source.tree) is not None:
            body = body[1:]
        fixed = {name: value for name, value in facts.items() if name not in assigned(body)}
        fixed |= constants(frame, body, fixed)
        statements = without_aliases(frame, specialised(frame, copy.deepcopy(body), fixed))
        plan = self._planned(frame, statements, fixed, [])
        self._open.pop()
        return plan

    def _planned(
        self,
        frame: Frame,
        statements: Sequence[ast.stmt],
        facts: Mapping[str, Any],
        later: Sequence[ast.stmt],
    ) -> Plan:
        rows = [
            (statement, self._candidates(frame, statement, facts, [*statements[n + 1 :], *later]))
            for n, statement in enumerate(statements)
        ]
        return Plan(frame, rows)

    def _candidates(
        self, frame: Frame, statement: ast.stmt, facts: Mapping[str, Any], later: Sequence[ast.stmt]
    ) -> list[Candidate]:
        if isinstance(statement, ast.For):
            loop = self._loop(frame, statement, facts, later)
            return [] if loop is None else [loop]
        if isinstance(statement, ast.With | ast.If | ast.Try | ast.While):
            return self._nested(frame, statement, facts)
        found = []
        for part in hoistable(statement):
            called = None
            if isinstance(part, ast.Call):
                match statement:
                    case ast.Assign([ast.Name(name)], value) if value is part:
                        target = name
                    case _:
                        target = f"_penstock_value_{next(self.numbers)}"
                called = self._of_call(frame, part, facts, [statement, *later], target)
            found.append(called or Candidate(parameters=0, call=part))
        return found

    def _loop(
        self, frame: Frame, loop: ast.For, facts: Mapping[str, Any], later: Sequence[ast.stmt]
    ) -> Candidate | None:
        """Return the rounds of a loop over modules; None if they are not known, or use no module."""
        values = rounds(frame, loop.iter, facts)
        if values is None:
            return None
        bodies = []
        changed = assigned(loop.body)
        for value in values:
            value = copy.deepcopy(value)
            bound = {n: v for n, v in _bound(loop.target, value).items() if n not in changed}
            bind = ast.copy_location(ast.Assign([copy.deepcopy(loop.target)], value), loop)
            body = [Substituted(bound).visit(copy.deepcopy(s)) for s in loop.body]
            names = assigned([loop.target])
            # Uses within the round are replaced; the variable is set where that cannot be done, and for code after the loop.
            if names - bound.keys() or names & live_before(later, set()):
                body.insert(0, ast.fix_missing_locations(bind))
            bodies.append(specialised(frame, body, facts))
        modules: list[nn.Module] = []
        weights: dict[int, nn.Parameter] = {}
        paths = {p: None for body in bodies for p in sorted(analyse(frame, copy.deepcopy(body))[1].paths)}
        for path in paths:
            found = part_of(frame, path)
            if isinstance(found, nn.Module):
                modules.append(found)
                weights.update({id(p): p for p in found.parameters()})
            elif isinstance(found, nn.Parameter):
                weights[id(found)] = found
        if not paths and values:
            return None
        after = [*loop.body, *later]
        candidate = Candidate(parameters=sum(p.numel() for p in weights.values()), modules=modules)
        candidate.rounds = [self._round(frame, body, facts, after, bodies) for body in bodies]
        for node in ast.walk(ast.Module([*loop.body], [])):
            if isinstance(node, ast.Return) or (
                isinstance(node, ast.Break) and not _in_inner_loop(loop, node)
            ):
                word = "return" if isinstance(node, ast.Return) else "break"
                candidate.refused = frame.source.refusal(
                    node,
                    f"a {word} leaves its loop over the blocks",
                    "let every block run, and skip within it",
                )
        if loop.orelse:
            candidate.refused = frame.source.refusal(
                loop, "its loop over the blocks has an else", "put that after the loop"
            )
        return candidate

    def _round(
        self,
        frame: Frame,
        body: list[ast.stmt],
        facts: Mapping[str, Any],
        later: Sequence[ast.stmt],
        among: Sized,
    ) -> Plan:
        """Return the statements of one round; with the blocks in it if there are so few rounds that it may be a stage."""
        if len(among) > MOST_STAGES:
            return Plan(frame, [(statement, []) for statement in body])
        return self._planned(frame, body, facts, later)

    def _nested(self, frame: Frame, statement: ast.stmt, facts: Mapping[str, Any]) -> list[Candidate]:
        """Return the blocks within a statement that cannot be divided."""
        modules: list[nn.Module] = []
        for node in ast.walk(statement):
            if isinstance(node, ast.For) and (found := self._loop(frame, node, facts, [])) is not None:
                modules += found.modules
            elif isinstance(node, ast.Call):
                called = self._of_call(frame, node, facts, [statement], "")
                modules += [m for leaf in called.leaves() for m in leaf.modules] if called is not None else []
        if not modules:
            return []
        word = type(statement).__name__.lower()
        fix = "run the loop outside of it"
        if isinstance(statement, ast.With):
            fix += (
                ", with the statement in the forward of the block (for autocast, give the Pipeline "
                "autocast=torch.bfloat16)"
            )
        article = "an" if word[0] in "aeiou" else "a"
        error = frame.source.refusal(
            statement, f"the loop over its blocks is within {article} {word} statement", fix
        )
        return [Candidate(parameters=_size(modules), modules=modules, refused=error)]

    def _of_call(
        self, frame: Frame, call: ast.Call, facts: Mapping[str, Any], later: Sequence[ast.stmt], target: str
    ) -> Candidate | None:
        """Return the blocks that a call runs; None if it runs none."""
        known = resolve_module(frame, call.func)
        if known is None:
            method = method_called(frame, call)
            if method is None or (id(method[1]), method[0]) in self._open:
                return None
            function, module, path = method
            prefix = self._prefix(frame, path, function.__name__)
            return self._entered(
                frame, call, facts, later, lambda: method_frame(function, module, path, prefix, frame)
            )
        module, path = known
        if is_plain_sequential(module):
            simple = len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Starred)
            if not simple or not any(True for _ in module.parameters()):
                return None
            found = Candidate(
                parameters=_size([module]), modules=list(module.children()), call=call, value=target
            )
            for name in module._modules:
                item = ast.Call(
                    ast.Attribute(call.func, name, ast.Load()), [ast.Name(target, ast.Load())], []
                )
                found.rounds.append(
                    self._round(frame, [assign(target, item, call)], facts, later, module._modules)
                )
            if has_forward_hooks(module):
                found.refused = frame.source.refusal(
                    call, "it calls an nn.Sequential with hooks, which would be lost", "remove them"
                )
            return found
        of_torch = type(module).__module__.startswith("torch.") and type(module) is not nn.TransformerEncoder
        if of_torch or not _has_blocks(module):
            return None
        if (id(module), type(module).forward) in self._open:
            return None
        prefix = self._prefix(frame, path)
        return self._entered(frame, call, facts, later, lambda: forward_frame(module, path, prefix, frame))

    def _prefix(self, frame: Frame, path: str, method: str = "") -> str:
        name = ".".join(filter(None, (path, method)))
        self._prefixes[name] += 1
        return name if self._prefixes[name] == 1 else f"{name}:{self._prefixes[name]}"

    def _entered(
        self,
        frame: Frame,
        call: ast.Call,
        facts: Mapping[str, Any],
        later: Sequence[ast.stmt],
        make: Any,
    ) -> Candidate | None:
        """Return the blocks in the forward or method that a call runs; None if it has none."""
        known = resolve_module(frame, call.func)
        modules = [] if known is None else [known[0]]
        try:
            inner = make()
            arguments = arguments_of(frame, inner, call)
            _share(frame, inner, call, arguments, later)
            values = {name: static_value(frame, node, facts) for name, node in arguments.items()}
            within = self.plan(inner, {n: v for n, v in values.items() if v is not UNKNOWN})
        except SplitError as error:
            return Candidate(parameters=_size(modules), modules=modules, call=call, refused=error)
        leaves = within.leaves()
        if not any(leaf.parameters or leaf.refused for leaf in leaves):
            return None
        if early := early_return(within.statements):
            size = sum(leaf.parameters for leaf in leaves)
            return Candidate(
                parameters=size, modules=modules, call=call, refused=refused_return(inner, early)
            )
        return Candidate(parameters=0, modules=modules, call=call, within=within, arguments=arguments)


def early_return(statements: Sequence[ast.stmt]) -> ast.AST | None:
    """Return a return statement among some statements of a forward, or within them, other than a last one."""
    last = bool(statements) and isinstance(statements[-1], ast.Return)
    return next(iter(own_returns(statements[:-1] if last else statements)), None)


def refused_return(frame: Frame, node: ast.AST) -> SplitError:
    """Return the error for a return before the end."""
    return frame.source.refusal(
        node,
        "it may return before its end, so that layers would be left out",
        "have one return, after the blocks",
    )


def is_plain_sequential(module: nn.Module) -> bool:
    """Return whether a call of a module calls its modules one after another, and does no more, apart from hooks."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and type(module).__iter__ is nn.Sequential.__iter__
        and calls_its_forward(module)
    )


def _is_like(candidate: Candidate, main: Candidate) -> bool:
    if main.is_stack and not candidate.is_stack:
        return False
    return (
        candidate.mean >= LEAST_SHARE * main.mean
        or bool(candidate.kinds & main.kinds)
        or candidate.depth >= main.depth
    )


def _share(
    frame: Frame,
    inner: Frame,
    call: ast.Call,
    arguments: Mapping[str, ast.expr],
    statements: Sequence[ast.stmt],
) -> None:
    """Let parameters of a forward be the variables that a call passes, where none sees the other's changes."""
    changed = assigned(inner.source.tree.body)
    after = _times_named(*statements) - _times_named(call)
    for name, node in arguments.items():
        if isinstance(node, ast.Name) and node.id in frame.names:
            key = frame.key(node.id)
            apart = name in changed and (after[node.id] > 0 or node.id in frame.shared)
            if not apart and key not in inner.shared.values():
                inner.shared[name] = key


def _times_named(*nodes: ast.AST) -> Counter[str]:
    return Counter(n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))


def _size(modules: Sequence[nn.Module]) -> int:
    """Return the number of parameters in some modules."""
    return sum(p.numel() for p in {id(p): p for m in modules for p in m.parameters()}.values())


def _has_blocks(module: nn.Module) -> bool:
    """Return whether a module may have blocks in its forward: a container, at some depth outside of torch's own modules."""
    return any(
        isinstance(m, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for m in module.modules()
        if m is not module
    )


def _in_inner_loop(loop: ast.For, node: ast.AST) -> bool:
    inner = [n for s in loop.body for n in ast.walk(s) if isinstance(n, ast.For | ast.While)]
    return any(node is below for n in inner for below in ast.walk(n))


def _bound(target: ast.expr, value: ast.expr) -> dict[str, ast.expr]:
    """Return the numbers and modules that a round's variables are."""
    if isinstance(target, ast.Name) and isinstance(value, ast.Constant | ast.Attribute):
        return {target.id: value}
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        parts = [_bound(t, v) for t, v in zip(target.elts, value.elts, strict=True)]
        return {name: inner for part in parts for name, inner in part.items()}
    return {}


def assign(name: str, value: ast.expr, like: ast.AST) -> ast.stmt:
    """Return the statement ``name = value``, with the place of another node in its file."""
    statement = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), like)
    return ast.fix_missing_locations(statement)


def part_of(frame: Frame, path: str) -> nn.Module | nn.Parameter | None:
    """Return the module or parameter of a name in the model; None for a buffer, or for None."""
    inner = path.removeprefix(f"{frame.path}.") if frame.path else path
    owner, _, last = inner.rpartition(".")
    module = frame.module.get_submodule(owner)
    return module._modules[last] if last in module._modules else module._parameters.get(last)


_STACKS = nn.TransformerDecoder | nn.Transformer


def no_blocks(frame: Frame, statements: Sequence[ast.stmt], facts: Mapping[str, Any]) -> SplitError:
    """Return the error for a forward without blocks, with the reason if it is a known one."""
    for statement in statements:
        for node in ast.walk(statement):
            reason = _reason(frame, node)
            if reason is not None:
                return frame.source.refusal(node, *reason)
    return frame.source.refusal(
        frame.source.tree,
        "no loop over modules, such as `for block in self.blocks:`, and no nn.Sequential of blocks is called in it "
        "outside of any if, with or try",
        "put the blocks into an nn.ModuleList, and call them one after another in such a loop",
    )


def _reason(frame: Frame, node: ast.AST) -> tuple[str, str] | None:
    match node:
        case ast.Call(ast.Attribute() | ast.Subscript() as called):
            known = resolve_module(frame, called)
            if known is not None and isinstance(known[0], _STACKS):
                kind = type(known[0]).__name__
                return (
                    f"its blocks are in torch's nn.{kind}, whose forward does more than call them",
                    "hold the blocks in an nn.ModuleList of your own, and call them in a loop",
                )
        case ast.For(_, ast.Call(ast.Name("range"))):
            return (
                "the number of rounds of the loop is not known when the model is split",
                "write `for block in self.blocks:`, or `for n in range(len(self.blocks)):`",
            )
    return None
