"""Schedules made by other projects: are they read, proved, simulated and run as they were meant?

Every order is written into a file of CSV as its project writes ops, and read from there. What `penstock.schedule.check` says
of it is compared with a slow answer that was written apart from it, and so is every end in the simulator. A valid order then
takes one step in threads, whose losses and gradients are compared with those of plain PyTorch: bit for bit, or to rounding
where it adds up the microbatches in another order. Orders come from the project's package where it is installed, and must
be those of our own rules; where it is not, the rules stand in for it. Refusals are listed below the table, one of each kind.

    python -m bench.conformance [--quick] [--json]

It ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch

from bench.compare import Figures, main
from bench.conformance import from_deepspeed, from_megatron, from_torch, from_torchgpipe
from bench.conformance.judge import Outcome, judge

FROM = (from_torch, from_deepspeed, from_megatron, from_torchgpipe)


def measure(options: argparse.Namespace) -> Figures:
    """Judge every order of every project."""
    torch.set_num_threads(1)
    rows = []
    reasons: list[str] = []
    yield f"{'':39} {'from':19} {'orders':>6} {'refused':>7} {'proved':>6} {'same bits':>9} {'to rounding':>11} {'WRONG':>5}"
    with tempfile.TemporaryDirectory() as folder:
        for project in chain.from_iterable(found.projects(options.quick) for found in FROM):
            outcomes = [(order.name, judge(order, Path(folder) / "theirs.csv")) for order in project.orders]
            words = Counter(outcome.word for _, outcome in outcomes)
            row = {
                "orders": len(outcomes), "refused": words["refused"], "proved": words["bits"] + words["rounding"],
                "bits": words["bits"], "rounding": words["rounding"], "wrong": words["WRONG"],
            }  # fmt: skip
            numbers = zip(row.values(), (6, 7, 6, 9, 11, 5), strict=True)
            yield f"{project.name:39} {project.source:19} " + " ".join(f"{n:{width}}" for n, width in numbers)
            rows.append({"name": project.name, "source": project.source, **row})
            reasons += [f"{project.name}: {line}" for line in reasons_of(outcomes)]
    yield from reasons
    return {"rows": rows, "reasons": reasons}


def reasons_of(outcomes: Iterable[tuple[str, Outcome]]) -> Iterator[str]:
    """Yield what is wrong, each order by itself, and the first refusal of each kind with the number of its like."""
    kinds: dict[str, list[str]] = {}
    for name, (word, why) in outcomes:
        if word == "WRONG":
            yield f"{name}: WRONG: {why}"
        elif why:
            # Two refusals are of one kind if they differ in numbers alone.
            kinds.setdefault(re.sub(r"\d+", "N", why), []).append(f"{name}: {why}")
    for alike in kinds.values():
        yield alike[0] + (f" ({len(alike)} of this kind)" if len(alike) > 1 else "")


if __name__ == "__main__":
    sys.exit(any(row["wrong"] for row in main(measure, __doc__)["rows"]))
