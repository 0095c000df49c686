"""Inject faults into real runs, and print their outcomes.

python -m bench.faults [--rows N,N,...] [--quick] [--json]
python -m bench.faults --every 15 [--minutes 20] [--seed 0] [--quick] [--json]

With --every, one run meets a fault at random every so many seconds, and then equals a run without faults.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench.compare import Figures, main
from bench.faults import doors, dying, every, inside, saves
from bench.faults.table import Outcome, Row

ROWS: list[Row] = sorted([*dying.ROWS, *inside.ROWS, *saves.ROWS, *doors.ROWS], key=lambda row: row.number)


def outcome_of(row: Row, quick: bool) -> Outcome:
    """Run one row in its own folder; if it raises an error, it counts as failed."""
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as folder:
        try:
            return row.run(Path(folder), quick)
        except Exception as error:
            return Outcome([f"{type(error).__name__}: {error}"], "")


def soak(options: argparse.Namespace) -> Figures:
    """Run with a fault every so many seconds."""
    disturbance = every.disturbance(options.every, options.minutes, options.seed, options.quick)
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as folder:
        result = every.soak(Path(folder), disturbance)
    yield from every.table(result, disturbance)
    return result | {"passed": every.passed(result)}


def measure(options: argparse.Namespace) -> Figures:
    """Run the requested rows, or a run with a fault every so many seconds."""
    if options.every:
        return (yield from soak(options))
    wanted = {int(word) for word in options.rows.split(",")} if options.rows else {row.number for row in ROWS}
    results = []
    for row in ROWS:
        if row.number not in wanted:
            continue
        began = time.perf_counter()
        outcome = outcome_of(row, options.quick)
        seconds = time.perf_counter() - began
        word = "passed" if outcome.passed else "FAILED"
        yield f"{row.number:>2} | {row.inject} | {row.passes} | {word} | {outcome.measured}"
        for failure in outcome.failures:
            yield f"   ! {failure}"
        print(f"row {row.number}: {seconds:.0f} s", file=sys.stderr, flush=True)
        results.append(
            {"row": row.number, "passed": outcome.passed, "measured": outcome.measured,
             "failures": outcome.failures, "seconds": seconds}
        )  # fmt: skip
    return {"rows": results, "passed": all(row["passed"] for row in results)}


def add(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--rows", help="rows, separated by commas (default all)")
    parser.add_argument("--every", type=float, help="seconds from one fault to the next, of one run")
    parser.add_argument("--minutes", type=float, default=20.0, help="minutes of that run (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of its faults (default 0)")


if __name__ == "__main__":
    sys.exit(not main(measure, __doc__, add=add)["passed"])
