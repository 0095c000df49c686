"""Loops over millions of ops, compiled by numba only when there are enough of them to pay for it.

A kernel is written once, in plain Python over arrays. Below `COMPILE_FROM` ops it runs as Python, so that the
commands start without importing numba; above, numba's compiled form of the same function runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

COMPILE_FROM = 30_000


@cache
def _compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    return numba.njit(cache=True)(kernel)


def choose(kernel: Callable[..., Any], ops: int) -> Callable[..., Any]:
    """Return `kernel` as it is for few ops, compiled for many."""
    return kernel if ops < COMPILE_FROM else _compiled(kernel)
