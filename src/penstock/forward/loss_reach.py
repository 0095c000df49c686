"""Parts that a loss function of the user's own reaches, as far as its code shows: modules, names and numbers."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType

from torch import nn

from penstock.forward.loss_piece import OwnLoss
from penstock.stage.compute.output_loss import OutputLoss
from penstock.stage.layers import source_of


def parts_of(function: object) -> Iterator[object]:
    """Yield a function, and what it holds: arguments of a partial, the object of a method, free and global variables."""
    yield function
    if isinstance(function, partial):
        for part in (function.func, *function.args, *function.keywords.values()):
            yield from parts_of(part)
    elif isinstance(function, OutputLoss):
        yield from parts_of(function.function)
    elif isinstance(function, MethodType):
        yield from parts_of(function.__self__)
        yield from parts_of(function.__func__)
    elif isinstance(function, FunctionType):
        yield from _variables(function).values()
    elif not isinstance(function, nn.Module | type) and callable(function) and hasattr(function, "__dict__"):
        yield from vars(function).values()
        yield type(function).__call__


def _variables(function: FunctionType) -> dict[str, object]:
    """Return the global and free variables that a function uses; those without a value yet are left out."""
    code, module = function.__code__, function.__globals__
    found = {name: module[name] for name in code.co_names if name in module}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is assigned later
            found[name] = cell.cell_contents
    return found


def modules_called(function: object) -> Iterator[nn.Module]:
    """Yield the modules that a function is or calls."""
    for part in parts_of(function):
        if isinstance(part, nn.Module):
            yield part
        elif isinstance(part, OwnLoss):
            yield part.module


def names_in(function: object) -> set[str]:
    """Return the names of attributes, and of keyword arguments, in the code that a function shows."""
    return {name for part in _functions(function) for name in _names(part.__code__)}


def passed_numbers(function: object, keyword: str) -> set[int | None]:
    """Return the numbers that a function's source passes on under a keyword; None for one that is not seen."""
    found: set[int | None] = set()
    for part in _functions(function):
        if keyword in _names(part.__code__):
            found |= _passed_in(part, keyword)
    return found


def _functions(function: object) -> list[FunctionType]:
    """Return the functions among a function's parts, and the forwards of modules that it calls, but for torch's own."""
    every = [
        part
        for part in parts_of(function)
        if isinstance(part, FunctionType) and not part.__module__.startswith("torch.")
    ]
    for module in modules_called(function):
        for inner in (source_of(m) for m in module.modules()):
            own = getattr(inner.forward, "__func__", None)
            if isinstance(own, FunctionType) and not type(inner).__module__.startswith("torch."):
                every.append(own)
    return every


def _passed_in(function: FunctionType, keyword: str) -> set[int | None]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source, or a lambda within an expression
        return {None}
    known = _variables(function)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    values = [word.value for call in calls for word in call.keywords if word.arg == keyword]
    return {_number(value, known) for value in values} or {None}


def _number(node: ast.expr, known: Mapping[str, object]) -> int | None:
    match node:
        case ast.Constant(int() as value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() as value)):
            return -value
        case ast.Name(name) if isinstance(number := known.get(name), int):
            return number
    return None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, tuple):  # the names of keyword arguments of a call
            yield from (name for name in constant if isinstance(name, str))
