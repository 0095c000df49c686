"""Small wrong changes in a training run, each planted alone, and whether `penstock.compare` names them.

Functions of the runtime (and some of DistributedDataParallel and torch.distributed.pipelining) are replaced by wrong ones
while two steps are recorded. The recording is compared with that of plain PyTorch. A mutant is detected if there is a
difference, and named if the first one has the right module or parameter, and is of the right kind: output, gradient of an
output, gradient or update. A run that Penstock itself refuses counts if the error names the thing. The exit code is 1 if
fewer than 95% are detected or fewer than 90% are named, if a mutant was not reached, or if a run without one differs.

    python -m bench.mutants [--only NAME] [--list] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.compare import Figures, main
from bench.mutants.mutant import MUTANTS, Mutant
from bench.mutants.run import Bench, Found
from bench.mutants.subjects import SUBJECTS

DETECTED, NAMED = 0.95, 0.90
"""Least shares of mutants that must be detected and named."""
QUICK = 12
"""Mutants of which ``--quick`` plants one."""


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """Return the mutants that the options ask for."""
    if options.only is None:
        return list(MUTANTS.values())[:: QUICK if options.quick else 1]
    if options.only not in MUTANTS:
        sys.exit(f"there is no mutant {options.only!r}; python -m bench.mutants --list names them")
    return [MUTANTS[options.only]]


def row(mutant: Mutant, found: Found) -> str:
    """Return a mutant's line in the table."""
    words = ["yes" if value else "NO" for value in (found.detected, found.named)]
    said = f"refused: {found.said}" if found.refused else found.said
    if found.error:
        said = f"ERROR: {said}"
    elif not found.reached:
        said = f"NOT REACHED: {said}"
    return (
        f"{mutant.name:50} {mutant.subject.name:11} {words[0]:4} {words[1]:4} {said:.150} [{mutant.source}]"
    )


def measure(options: argparse.Namespace) -> Figures:
    """Compare each subject without a mutant, then plant the mutants."""
    if options.list:
        for mutant in MUTANTS.values():
            yield f"{mutant.name:50} {mutant.subject.name:11} [{mutant.source}]"
        return {"good": True}
    began, bench = time.perf_counter(), Bench()
    mutants = chosen(options)
    found: dict[str, Found] = {}
    unclean = []
    try:
        for subject in (s for s in SUBJECTS if any(m.subject is s for m in mutants)):
            _, errors, comparison = bench.compare(subject)
            if comparison is None or not comparison.good:
                unclean.append(subject.name)
                yield f"{subject.name}, without a mutant: {errors or comparison}"
        yield f"{'mutant':50} {'run':11} {'det.':4} {'nam.':4} first difference [source]"
        for mutant in mutants:
            found[mutant.name] = bench.find(mutant)
            yield row(mutant, found[mutant.name])
    finally:
        bench.close()
    yield from totals(found, unclean)
    yield f"{time.perf_counter() - began:.0f} s"
    return figures(found, unclean)


def figures(found: dict[str, Found], unclean: Sequence[str]) -> dict[str, Any]:
    """Return the counts, and whether they are good enough."""
    detected, named = (sum(getattr(f, what) for f in found.values()) for what in ("detected", "named"))
    astray = sum(not f.good for f in found.values())
    enough = detected >= DETECTED * len(found) and named >= NAMED * len(found)
    return {
        "mutants": len(found),
        "detected": detected,
        "named": named,
        "refused": sum(f.refused for f in found.values()),
        "astray": astray,
        "unclean": list(unclean),
        "good": enough and not astray and not unclean,
    }


def totals(found: dict[str, Found], unclean: Sequence[str]) -> list[str]:
    """Return the lines below the table."""
    counts = figures(found, unclean)
    count = counts["mutants"]
    return [
        f"{what}: {counts[what]} of {count}, {counts[what] / count:.1%}" for what in ("detected", "named")
    ] + [
        f"refused by an error: {counts['refused']}; not reached or failed: {counts['astray']}; "
        f"runs without a mutant that differ: {len(unclean)}"
    ]


def add(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--only", metavar="NAME", help="plant this mutant alone")
    parser.add_argument("--list", action="store_true", help="print the mutants' names, and plant none")


if __name__ == "__main__":
    sys.exit(not main(measure, __doc__, add=add)["good"])
