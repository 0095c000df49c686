"""Source of a model's forward, proved to be the code that runs."""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

from penstock.base.errors import SplitError

BY_HAND = "or give the layers yourself, as docs/models.md shows under 'Layers by hand'"
# Code is compared with a new compilation of its file, which needs the same future imports: they change the code.
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag


@dataclass(frozen=True)
class ForwardSource:
    """Source of a method."""

    function: FunctionType
    tree: ast.FunctionDef
    owner: str

    @cached_property
    def local_names(self) -> set[str]:
        """Names of parameters and variables of the method and of functions within it."""
        arguments = {a.arg for a in ast.walk(self.tree) if isinstance(a, ast.arg)}
        stored = {
            n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
        }
        return arguments | stored

    def refusal(self, node: ast.AST, problem: str, fix: str) -> SplitError:
        """Return the error for a statement that cannot be split; `problem` continues "its forward ..."."""
        line = getattr(node, "lineno", self.tree.lineno)
        file = self.function.__code__.co_filename
        shown = _Indexed().visit(copy.deepcopy(node))
        text = ast.unparse(shown).splitlines()[0] if hasattr(node, "lineno") else self.owner
        return SplitError(
            f"cannot split by {self.owner}: {problem} ({file}:{line}: {text[:100]}); {fix}, {BY_HAND}"
        )


class _Indexed(ast.NodeTransformer):
    """Writes children of containers as the user does: ``blocks[0]`` for the attribute "0" of ``blocks``."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        return (
            ast.Subscript(node.value, ast.Constant(int(node.attr)), node.ctx)
            if node.attr.isdecimal()
            else node
        )


def read_source(function: Any, owner: str, is_property: bool = False) -> ForwardSource:
    """Return the source of a method."""
    if (inner := inspect.unwrap(function)) is not function:
        code = inner.__code__
        raise SplitError(
            f"cannot split by {owner}: it is decorated ({code.co_filename}:{code.co_firstlineno}); take the decorator off, "
            f"{BY_HAND}"
        )
    if not isinstance(function, FunctionType):
        # without the first word, 'or'
        raise SplitError(f"cannot split by {owner}: it is a {type(function).__name__}; {BY_HAND[3:]}")
    code, file = function.__code__, inspect.getsourcefile(function) or function.__code__.co_filename
    text = "".join(linecache.getlines(file, function.__globals__))
    try:
        module = ast.parse(text, file)
        now = compile(text, file, "exec", flags=code.co_flags & _FUTURE, dont_inherit=True)
    except SyntaxError:
        text = ""
    if not text:
        raise SplitError(
            f"cannot split by {owner}: its source cannot be read (a class typed into an interpreter has none); put the "
            f"class into a file, {BY_HAND}"
        )
    trees = [
        n
        for n in ast.walk(module)
        if isinstance(n, ast.FunctionDef) and _first_line(n) == code.co_firstlineno
    ]
    tree = next((n for n in trees if n.name == code.co_name), None)
    if tree is None or not any(_same(c, code) for c in _codes(now)):
        raise SplitError(
            f"cannot split by {owner}: its source in {file} differs from the code that runs; the file was edited since it "
            "was loaded, or a tool rewrote the code (pytest does so in test files): start again, or put the class into a "
            f"module of its own, {BY_HAND}"
        )
    source = ForwardSource(function, tree, owner)
    if tree.decorator_list and not is_property:
        raise source.refusal(tree, "it is decorated", "take the decorator off")
    return source


def _first_line(tree: ast.FunctionDef) -> int:
    return min([tree.lineno, *(d.lineno for d in tree.decorator_list)])


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def factory_of(definitions: list[ast.stmt], source: ForwardSource) -> CodeType:
    """Compile definitions within a function whose arguments are the free variables of the source's function."""
    free = [ast.arg(name) for name in source.function.__code__.co_freevars]
    arguments = ast.arguments(posonlyargs=[], args=free, kwonlyargs=[], kw_defaults=[], defaults=[])
    outer = ast.FunctionDef("factory", arguments, definitions, [])
    ast.copy_location(outer, source.tree)
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code = source.function.__code__
    compiled = compile(module, code.co_filename, "exec", flags=code.co_flags & _FUTURE, dont_inherit=True)
    return next(const for const in compiled.co_consts if isinstance(const, CodeType))


def function_named(code: CodeType, name: str) -> CodeType:
    """Return the code of a function that is defined directly in another."""
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _same(one: CodeType, other: CodeType) -> bool:
    fields = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_firstlineno")
    if any(getattr(one, f) != getattr(other, f) for f in fields) or len(one.co_consts) != len(
        other.co_consts
    ):
        return False
    return all(
        _same(a, b)
        if isinstance(a, CodeType) and isinstance(b, CodeType)
        else type(a) is type(b) and repr(a) == repr(b)
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )
