"""Found schedules and published ones on sleeping stages, in processes and in turn: how much of the gain is real."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.sleep import Sleeper, batch, loss, oversleep, step_seconds
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.schedule.memory import Budget
from penstock.schedule.schedule import Schedule
from penstock.simulate.certified_search import search_schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan

UNIT = 0.002


class Case(NamedTuple):
    """A published schedule, the F, I and W of its stages in units, and the activations that a rank may hold."""

    family: str
    p: int
    m: int
    costs: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    limit: int


def _equal(stages: int, f: int, b: int, w: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return (f,) * stages, (b,) * stages, (w,) * stages


CASES = (
    Case("v-min", 4, 8, _equal(8, 3, 4, 2), 4),
    Case("v-min", 4, 8, _equal(8, 3, 4, 2), 5),
    Case("v-half", 4, 8, _equal(8, 3, 4, 2), 7),
    Case("v-min", 8, 16, _equal(16, 3, 4, 2), 8),
    Case("v-half", 8, 16, _equal(16, 3, 4, 2), 10),
)


def sleeping(rounds: int, quick: bool) -> Iterator[Any]:
    """Yield the table; return its figures."""
    torch.set_num_threads(1)
    yield "published     p   m  held             simulated          measured, ms     gain  measured   share"
    rows = []
    with LocalProcesses(8) as pool:
        for case in CASES[:1] if quick else CASES:
            theirs = build_schedule(case.family, case.p, case.m)
            costs = Costs.of(theirs.placement, *case.costs)
            took = makespan(simulate(check(theirs, budget=Budget(case.limit)).program, costs))
            ours = search_schedule(
                theirs.placement, case.m, costs, "split", Budget(case.limit), seconds=60 if quick else 10,
                progress=partial(_end_below, took) if quick else None,
            )  # fmt: skip
            job = ([theirs, ours.schedule], case.costs, rounds)
            times = pool.run(case.p, alternating, *job, timeout=550)[0]
            before, after = (statistics.median(each) for each in zip(*times, strict=True))
            gain = 1 - float(ours.makespan) / float(took)
            measured = statistics.median(1 - b / a for a, b in times)
            share = measured / gain if gain > 0 else math.nan
            rows.append(
                {
                    "published": case.family, "ranks": case.p, "microbatches": case.m, "limit": case.limit,
                    "predicted": gain, "measured": measured, "share": None if math.isnan(share) else share,
                }
            )  # fmt: skip
            yield (
                f"{case.family:12}{case.p:3}{case.m:4}{case.limit:6}{took:11}{ours.makespan:11}{1e3 * before:11.1f}"
                f"{1e3 * after:11.1f}{gain:9.1%}{measured:10.1%}{share:8.0%}"
            )
    shares = [row["share"] for row in rows if row["predicted"] > 0]
    yield f"gained of what was predicted: {min(shares, default=math.nan):.0%} at least"
    return {"rows": rows}


def _end_below(makespan: float, _: int, best: float) -> None:
    """End a search that has found a shorter makespan."""
    if best < makespan:
        raise KeyboardInterrupt


def alternating(
    rank: int, schedules: list[Schedule], costs: tuple[tuple[int, ...], ...], rounds: int
) -> list[list[float]]:
    """Return seconds of a step by each schedule, in turn."""
    oversleep()
    x, y = batch(schedules[0].microbatches, 1024)
    pipes = []
    for schedule in schedules:
        stages = [Sleeper(1, [UNIT * float(each) for each in stage]) for stage in zip(*costs, strict=True)]
        pipes.append(
            Pipeline(
                nn.Sequential(*stages), loss, microbatches=schedule.microbatches, schedule=schedule,
                virtual_stages=schedule.stages // schedule.ranks, execution=ExecutionOptions(check_finite=False),
            )
        )  # fmt: skip
    try:
        return [[step_seconds(pipe, x, y) for pipe in pipes] for _ in range(rounds + 1)][1:]
    finally:
        for pipe in pipes:
            pipe.close()
