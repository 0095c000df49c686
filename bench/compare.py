"""Parts that all benches share: command line, alternating runs, medians, and one table or one JSON object."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from tests.support.children import end_with_this_process

Figures = Generator[str, None, dict[str, Any]]
"""A measurement under way: it yields the lines of its table, and returns the figures."""


def main(
    measure: Callable[[argparse.Namespace], Figures],
    doc: str | None,
    *,
    rounds: int | None = None,
    add: Callable[[argparse.ArgumentParser], object] | None = None,
) -> dict[str, Any]:
    """Read the command line, measure, and print the figures and the machine; no process is left behind, however it ends.

    Args:
        measure: function that gets the options and measures.
        doc: description for ``--help``, the module's docstring.
        rounds: default of ``--rounds``, which ``--quick`` makes 1; None for a bench without rounds.
        add: function that adds the bench's own arguments to the parser.

    Returns:
        The figures.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=int, help=f"rounds of all contestants (default {rounds}, with --quick 1)"
        )
    if add is not None:
        add(parser)
    parser.add_argument("--quick", action="store_true", help="measure with the fewest cases and rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if rounds is not None and options.rounds is None:
        options.rounds = 1 if options.quick else rounds
    end_with_this_process()
    result = printed(measure(options), quiet=options.json)
    print(json.dumps({**result, "machine": machine()}) if options.json else machine())
    return result


def printed(figures: Figures, quiet: bool) -> dict[str, Any]:
    """Print lines as they come, unless quiet, and return the figures."""
    while True:
        try:
            line = next(figures)
        except StopIteration as done:
            return done.value  # StopIteration does not say
        if not quiet:
            print(line, flush=True)


def alternate(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every contestant once per round, in turn, after a round that does not count.

    The machine's speed drifts, so only runs of the same round are compared. One round alone shows that a bench runs, not
    how fast: no other comes before it.
    """
    if rounds > 1:
        for run in runs.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def machine() -> str:
    """Return a short description of the machine."""
    import torch

    return f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
