"""Steps that flow into each other, on stages that sleep: time of a step over the work of one rank.

Stages sleep as in `bench.sleep`, but three times as long: a rank's forward, input gradient and weight gradient of a
microbatch take 12 ms each, so that eight busy processes fit on two cores. A run is 20 steps and updates, one process a
rank, after two that do not count. Its time is from the barrier before it to the moment when the last rank has ended, divided
by the steps. The work is the time of one rank's own ops, the mean over all steps and the longest of all ranks. The simulator
says what a barrier costs: the makespan of a step over the work of its busiest rank, which is the loss that the zero-bubble
paper (2401.10241) avoids. The loss published for a run with the barrier is 8 to 10% of its throughput.

    python -m bench.flow [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from bench.compare import Figures, main
from bench.sleep import batch, loss, model, oversleep
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import build_schedule
from penstock.simulate.costs import Costs
from penstock.simulate.steps import simulate_steps
from penstock.trace.bubbles import busy

STEPS = 20
ELEMENTS = 1024
TIMES = 3


class Run(NamedTuple):
    """Seconds of a step and of the busiest rank's work in it, and updates of this rank made ahead and undone."""

    step: float
    work: float
    ahead: int
    undone: int


def run(rank: int, name: str, ranks: int, microbatches: int, steps: int, flow: bool) -> Run:
    """Return the figures of one run; every rank calls it."""
    x, y = batch(microbatches, ELEMENTS)
    oversleep()
    working = 0.0
    with Pipeline(
        model(name, ranks, TIMES),
        loss,
        microbatches=microbatches,
        schedule=name,
        ranks=ranks,
        execution=ExecutionOptions(check_finite=False),  # what sleeping stages hand back was never written to
    ) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-3, flow=flow)
        for _ in range(2):
            pipe.step(x, y)
            optimizer.step()
        pipe.wait()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            pipe.step(x, y)
            optimizer.step()
            trace = pipe.trace()
            assert trace is not None, "a step has been done"
            working += float(busy(trace)[rank])
        pipe.wait()
        # One clock for all processes of a machine.
        ends = torch.tensor([time.perf_counter() - began, working], dtype=torch.float64) / steps
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        counts = (0, 0) if pipe.flow is None else (pipe.flow.ahead, pipe.flow.undone)
    return Run(ends[0].item(), ends[1].item(), *counts)


def measure(options: argparse.Namespace) -> Figures:
    """Measure every schedule with every number of ranks, with a barrier and without."""
    torch.set_num_threads(1)
    cases = [("zb-v", 4)] if options.quick else list(product(("zb-h2", "zb-v"), (4, 8)))
    steps = 4 if options.quick else STEPS
    rows: list[dict[str, Any]] = []
    yield (
        f"{'schedule':10}{'p':>3}{'m':>4}{'work ms':>9}{'barrier':>9}{'flowing':>9}{'gain':>8}"
        f"{'simulated barrier':>19}{'ahead':>7}  (over the work)"
    )
    with LocalProcesses(max(p for _, p in cases)) as pool:
        for name, p in cases:
            m = 4 * p
            schedule = build_schedule(name, p, m, None)
            planned = simulate_steps(schedule, Costs.of(schedule.placement, 4, 4, 4), 3)
            pairs = []
            for _ in range(options.rounds):
                pairs.append(
                    [pool.run(p, run, name, p, m, steps, flow, timeout=300) for flow in (False, True)]
                )
            barrier, flowing = ([pair[n][0].step / pair[n][0].work for pair in pairs] for n in range(2))
            gains = [1 - pair[1][0].step / pair[0][0].step for pair in pairs]
            row = {
                "schedule": name, "ranks": p, "microbatches": m,
                "work": statistics.median(pair[1][0].work for pair in pairs),
                "barrier": statistics.median(barrier), "flowing": statistics.median(flowing),
                "gain": statistics.median(gains),
                "simulated": planned.barrier / planned.work,
                "ahead": sum(each.ahead for pair in pairs for each in pair[1]) / (p * (steps + 2) * len(pairs)),
            }  # fmt: skip
            rows.append(row)
            yield (
                f"{name:10}{p:3}{m:4}{1e3 * row['work']:9.1f}{row['barrier']:9.3f}{row['flowing']:9.3f}{row['gain']:8.1%}"
                f"{row['simulated']:19.3f}{row['ahead']:7.0%}"
            )
    yield f"{steps} steps a run, median of {options.rounds} runs; published gain without the barrier: 8-10%"
    return {"rows": rows, "worst": max(row["flowing"] for row in rows)}


if __name__ == "__main__":
    main(measure, __doc__, rounds=3)
