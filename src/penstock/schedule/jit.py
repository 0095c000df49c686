"""Loops over millions of ops, compiled by numba only when there are enough of them to pay for it.

A kernel is written once, in plain Python over arrays. Below `COMPILE_FROM` ops it runs as Python, so that the
commands start without importing numba; above, numba's compiled form of the same function runs. A kernel may call
other functions of its module; they are compiled with it. Without numba, which is optional, every kernel runs as Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any

# With fewer ops, plain Python is done before numba would be imported.
COMPILE_FROM = 30_000
SLOW_FROM = 2_000_000
"""Ops from which plain Python takes many seconds."""


@cache
def _compiled(kernel: FunctionType) -> Callable[..., Any]:
    import numba

    # numba cannot call plain functions: the kernel's globals get the compiled ones under their names.
    called = {
        name: _compiled(value)
        for name in kernel.__code__.co_names
        if isinstance(value := kernel.__globals__.get(name), FunctionType)
    }
    linked = FunctionType(kernel.__code__, kernel.__globals__ | called, kernel.__name__)
    return numba.njit(cache=True)(linked)


def choose(kernel: Callable[..., Any], ops: int) -> Callable[..., Any]:
    """Return `kernel` itself for few ops or without numba, its compiled form for many.

    Warns:
        RuntimeWarning: if there are so many ops that it takes long without numba, which is not installed.
    """
    if ops < COMPILE_FROM:
        return kernel
    if find_spec("numba") is None:
        if ops >= SLOW_FROM:
            text = "this schedule or search takes many times as long without numba: pip install 'penstock-torch[fast]'"
            warnings.warn(text, RuntimeWarning, stacklevel=1)  # so that it is printed once
        return kernel
    assert isinstance(kernel, FunctionType)
    return _compiled(kernel)
