"""A failing case made simpler for as long as it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.base.errors import ScheduleError
from tests.zoo.case import Case

SIMPLEST = {
    "habit": "none",
    "loss": "mse",
    "recompute": "none",
    "autocast": False,
    "shard": "none",
    "dp": 1,
    "reduction": "mean",
    "uneven": "even",
    "accumulate": 1,
    "clip": 0.0,
    "wrapped": False,
    "optimizer": "sgd",
    "forward": "",
    "form": "list",
    "transport": "threads",
    "steps": 1,
}


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest steps first."""
    for n in range(len(case.kinds)) if len(case.kinds) > 1 else ():
        yield replace(case, kinds=case.kinds[:n] + case.kinds[n + 1 :])
    for name, value in SIMPLEST.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        if case.schedule != schedule:
            yield replace(case, schedule=schedule, virtual_stages=1)
        else:
            break
    if case.virtual_stages > 1:
        yield replace(case, virtual_stages=1)
    if case.ranks > 1:
        yield replace(case, ranks=case.ranks - 1)
    if case.microbatches > 1:
        yield replace(case, microbatches=case.microbatches - 1)
    if case.rows > 2:
        yield replace(case, rows=2)


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 60) -> Case:
    """The simplest case that still fails, after so many tries at most."""
    again = True
    while again:
        again = False
        for smaller in simpler(case):
            try:
                fits = smaller.stages >= 1 and smaller.processes <= 4
                fits = fits and (smaller.dp == 1 or smaller.transport == "processes")
            except ScheduleError:
                continue
            if not fits:
                continue
            tries -= 1
            if tries < 0:
                return case
            if fails(smaller):
                case, again = smaller, True
                break
    return case
