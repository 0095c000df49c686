"""Several cases in one process group: making a group takes as long as many a case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.base.errors import PenstockError
from penstock.runtime.workers.pool import LocalProcesses


def run_cases(
    processes: LocalProcesses,
    ranks: int,
    function: Callable[..., Any],
    cases: Sequence[tuple[object, ...]],
    timeout: float = 600.0,
) -> list[list[Any]]:
    """Run ``function(rank, *case)`` for one case after the other in one group, and return its results by case and rank."""
    by_rank = processes.run(ranks, _one_after_another, function, cases, timeout=timeout)
    return [list(results) for results in zip(*by_rank, strict=True)]


def _one_after_another(
    rank: int, function: Callable[..., Any], cases: Sequence[tuple[object, ...]]
) -> list[Any]:
    results = []
    for case in cases:
        try:
            results.append(function(rank, *case))
        except Exception as error:
            error.add_note(f"in the case {case}")
            raise
    return results


def outcome(call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """Return the class and text of the error that a call ends with, or "ok"."""
    try:
        call(*given, **named)
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "ok"
