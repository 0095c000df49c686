"""The table: ``python -m bench.faults``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench.compare import emit, machine
from bench.faults import doors, dying, inside, saves
from bench.faults.table import Outcome, Row

ROWS: list[Row] = sorted([*dying.ROWS, *inside.ROWS, *saves.ROWS, *doors.ROWS], key=lambda row: row.number)


def measure(row: Row, quick: bool) -> Outcome:
    """Run one row in a folder of its own; what it cannot cope with counts as not passed."""
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as folder:
        try:
            return row.run(Path(folder), quick)
        except Exception as error:
            return Outcome([f"{type(error).__name__}: {error}"], "")


def main() -> None:
    """Run the rows that are wanted and print them."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description="Put faults into real runs and print what became of them."
    )
    parser.add_argument(
        "--rows", default=",".join(str(row.number) for row in ROWS), help="with commas between"
    )
    parser.add_argument("--quick", action="store_true", help="one case of each sort")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wanted = {int(word) for word in options.rows.split(",")}
    results, lines = [], []
    for row in ROWS:
        if row.number not in wanted:
            continue
        began = time.perf_counter()
        outcome = measure(row, options.quick)
        seconds = time.perf_counter() - began
        word = "passed" if outcome.passed else "FAILED"
        line = f"{row.number:>2} | {row.inject} | {row.passes} | {word} | {outcome.measured}"
        for failure in outcome.failures:
            line += f"\n   ! {failure}"
        print(f"{line}  [{seconds:.0f} s]", file=sys.stderr, flush=True)
        lines.append(line)
        results.append(
            {"row": row.number, "passed": outcome.passed, "measured": outcome.measured,
             "failures": outcome.failures, "seconds": seconds}
        )  # fmt: skip
    emit({"rows": results, "machine": machine()}, [*lines, machine()], options.json)
    sys.exit(0 if all(result["passed"] for result in results) else 1)


if __name__ == "__main__":
    main()
