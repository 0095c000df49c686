"""Inject faults into real runs, and print their outcomes.

python -m bench.faults [--rows N,N,...] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench.compare import Figures, main
from bench.faults import doors, dying, inside, saves
from bench.faults.table import Outcome, Row

ROWS: list[Row] = sorted([*dying.ROWS, *inside.ROWS, *saves.ROWS, *doors.ROWS], key=lambda row: row.number)


def outcome_of(row: Row, quick: bool) -> Outcome:
    """Run one row in its own folder; if it raises an error, it counts as failed."""
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as folder:
        try:
            return row.run(Path(folder), quick)
        except Exception as error:
            return Outcome([f"{type(error).__name__}: {error}"], "")


def measure(options: argparse.Namespace) -> Figures:
    """Run the requested rows."""
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
    return {"rows": results}


def add(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--rows", help="rows, separated by commas (default all)")


if __name__ == "__main__":
    sys.exit(not all(row["passed"] for row in main(measure, __doc__, add=add)["rows"]))
