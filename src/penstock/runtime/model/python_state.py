"""State that modules and functions keep in Python, so that a run of them can be undone."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.stage.compute.module_buffers import snapshot
from penstock.stage.layers import INTERNAL

_DEPTH = 3
"""Levels of attributes that are looked at: contexts in modules, and the lists and numbers in these."""

_MOST = 10_000
"""Items of a container that may be state; more are data."""

_Restore = Callable[[], object]


@contextmanager
def python_state_kept(objects: Iterable[object]) -> Iterator[None]:
    """Return a context after which objects have the state in Python that they had before it.

    The state is attributes and buffers of modules (not of those within them), memory of parameters of libraries' classes,
    attributes of objects of the user's classes, closures of functions, what lists, dictionaries, sets, tensors, iterators
    and generators of random numbers among these hold, and the random generators of Python, NumPy and torch.
    """
    found: dict[int, tuple[object, _Restore]] = {}
    for value in objects:
        _remember(value, _DEPTH, found)
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_rng_state(generators[2])
        for _, restore in found.values():
            restore()


def _remember(value: object, depth: int, found: dict[int, tuple[object, _Restore]]) -> None:
    if id(value) in found:
        return
    kept = _restore_of(value)
    if kept is None:
        return
    restore, inner = kept
    found[id(value)] = value, restore  # the object too: its number must not go to another one
    for part in inner if depth else ():
        _remember(part, depth - 1, found)


def _restore_of(value: object) -> tuple[_Restore, list[Any]] | None:
    """Return a function that gives an object back its state, and the objects in the state; None if it has none."""
    match value:
        case nn.Parameter():
            return _restore_parameter(value) if _of_user(type(value)) else None
        case Tensor():
            return _restore_tensor(value), []
        case list() | deque():
            before = list(value)
            return lambda: None if _same(value, before) else _refill(value, before), before[:_MOST]
        case dict():
            return _restore_dict(value), [*value.values()][:_MOST]
        case torch.Generator():
            return partial(value.set_state, value.get_state()), []
        case random.Random():
            return partial(value.setstate, value.getstate()), []
        case set():
            return _restore_set(value), []
        case FunctionType():
            return _restore_closure(value)
        case MethodType():
            return (lambda: None), [value.__self__, value.__func__]
        case type() | ModuleType() | BuiltinFunctionType():
            return None
        case nn.Module():
            attributes = {n: v for n, v in vars(value).items() if n not in INTERNAL}
            restore = _restore_dict(vars(value), attributes)
            own = [p for p in value._parameters.values() if _of_user(type(p))]
            return restore, [*attributes.values(), value._buffers, *own]
        case np.ndarray() if value.flags.writeable:
            return partial(np.copyto, value, value.copy()), []
    if not hasattr(value, "__dict__") or not _of_user(type(value)):
        return None
    return _restore_dict(vars(value)), [*vars(value).values()]


def _of_user(kind: type) -> bool:
    """Return whether a class is neither torch's nor Python's own, whose objects are shared with others, as loggers are."""
    package = kind.__module__.partition(".")[0]
    return kind is SimpleNamespace or (
        package not in sys.stdlib_module_names and package not in ("torch", "penstock")
    )


def _restore_tensor(tensor: Tensor) -> _Restore:
    return (lambda: None) if tensor.is_inference() or tensor.is_meta else snapshot(tensor)


def _restore_parameter(parameter: nn.Parameter) -> tuple[_Restore, list[Any]]:
    """Return a function that gives a parameter of a library's class, such as quantised weights, back its memory.

    Some pack their weights in another way for an evaluation, with the numbers by which they are read in attributes.
    """
    memory, attributes = parameter.data, _restore_dict(vars(parameter))

    def restore() -> None:
        if parameter.data_ptr() != memory.data_ptr():
            parameter.data = memory
        attributes()

    return restore, [*vars(parameter).values()]


def _restore_set(values: set[Any]) -> _Restore:
    before = set(values)

    def restore() -> None:
        values.clear()
        values.update(before)

    return restore


def _restore_dict(values: dict[Any, Any], of: dict[Any, Any] | None = None) -> _Restore:
    """Return a function that restores the entries of a dictionary, or some of them."""
    before = dict(values) if of is None else of
    # What has been taken from an iterator is gone, so a copy takes its place.
    iterators = {name: _copied(value) for name, value in before.items() if isinstance(value, Iterator)}

    def restore() -> None:
        kept = values if of is None else {n: v for n, v in values.items() if n not in INTERNAL}
        for name in kept.keys() - before.keys():
            del values[name]
        for name, value in before.items():
            if values.get(name, values) is not value:
                values[name] = value
        values.update(iterators)

    return restore


def _copied(iterator: Iterator[Any]) -> Iterator[Any]:
    try:
        return copy.copy(iterator)
    except TypeError:  # a generator
        return iterator


def _restore_closure(function: FunctionType) -> tuple[_Restore, list[Any]]:
    cells = [cell for cell in function.__closure__ or () if _is_set(cell)]
    before = [cell.cell_contents for cell in cells]

    def restore() -> None:
        for cell, value in zip(cells, before, strict=True):
            if cell.cell_contents is not value:
                cell.cell_contents = value

    return restore, [*before, vars(function)]


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _same(value: Any, before: list[Any]) -> bool:
    return len(value) == len(before) and all(one is other for one, other in zip(value, before, strict=True))


def _refill(value: Any, before: list[Any]) -> None:
    value.clear()
    value.extend(before)
