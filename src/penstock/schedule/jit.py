"""Loops over millions of ops, compiled by numba only when there are enough of them to pay for it.

A kernel is written once, in plain Python over arrays. Below `COMPILE_FROM` ops it runs as Python, so that the
commands start without importing numba; above, numba's compiled form of the same function runs. A kernel may call
other functions of its module; they are compiled with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

COMPILE_FROM = 30_000


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
    """Return `kernel` itself for few ops, its compiled form for many."""
    if ops < COMPILE_FROM:
        return kernel
    assert isinstance(kernel, FunctionType)
    return _compiled(kernel)
