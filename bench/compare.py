"""What every comparison shares: alternating runs, medians, one table or one JSON object."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch


def alternate(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every contestant once a round, in turn, after one round that does not count.

    The machine's speed drifts, so only runs of the same round are compared.
    """
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def machine() -> str:
    """The machine in a few words."""
    return f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"


def emit(result: Mapping[str, object], lines: Sequence[str], as_json: bool) -> None:
    """Print one JSON object, or the lines."""
    if as_json:
        print(json.dumps(result))
    else:
        print("\n".join(lines))
