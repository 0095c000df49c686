"""Stages that sleep instead of computing, so that eight ranks fit on two cores.

A rank's forward of a microbatch sleeps 4 ms, its input gradient 4 ms, its weight gradient 4 ms, divided among its stages.
The measured makespan of a step is compared with the simulator's for the same Program (no latency, no overhead), whose costs
are the times of one such stage's ops when nothing else runs, and with torch.distributed.pipelining's.

    python -m bench.sleep [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from bench.compare import Figures, main
from bench.peer import SCHEDULES
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.program import lower
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.stage.compute.stage import Stage
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule
from penstock.stage.values import Message
from penstock.trace.bubbles import makespan

FORWARD = INPUT = WEIGHT = 0.004
SPREAD = 0.15
"""Seconds in which all ranks have left a collective, at the longest latency that is measured."""
SIZES = {"4 KB": 1024, "4 MB": 1 << 20}
SCHEDULE_NAMES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


def nap_until(moment: float) -> None:
    """Sleep until a moment of ``time.perf_counter``, and allow for the system's habit of sleeping too long."""
    left = moment - time.perf_counter() - oversleep()
    if left > 0:
        time.sleep(left)


@cache
def oversleep() -> float:
    """Return by how many seconds a sleep of 2 ms is usually too long on this machine."""
    found = []
    for _ in range(50):
        begin = time.perf_counter()
        time.sleep(0.002)
        found.append(time.perf_counter() - begin - 0.002)
    return statistics.median(found)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, drop: torch.Tensor, until: float, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        nap_until(until)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        nap_until(time.perf_counter() + ctx.backward_seconds)
        return torch.empty_like(grad), torch.ones(1, 1), None, None


class Sleeper(nn.Module):
    """A stage of 1/v of a rank's work; its weight gradient takes time too, wherever the schedule places it."""

    def __init__(self, virtual: float, seconds: Sequence[float] = (FORWARD, INPUT, WEIGHT)) -> None:
        super().__init__()
        self.forward_seconds, self.input_seconds, weight = (each / virtual for each in seconds)
        self.gate = nn.Linear(1, 1, bias=False)
        self.gate.weight.register_hook(lambda grad: nap_until(time.perf_counter() + weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        until = time.perf_counter() + self.forward_seconds
        drop = self.gate(torch.ones(1, 1))  # real work for a weight, next to none
        return _Sleep.apply(x, drop, until, self.input_seconds)


class _First(torch.autograd.Function):
    """The first element as a loss; the gradient is as large as the input, but costs nothing to make."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.view(-1)[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ones(ctx.shape)


@cache
def ones(shape: torch.Size) -> torch.Tensor:
    """Return a gradient."""
    return torch.ones(shape)


def batch(microbatches: int, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input and target; a microbatch is one row."""
    return torch.zeros(microbatches, elements), torch.zeros(microbatches, elements)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss that costs almost nothing."""
    return _First.apply(output)


def model(name: str, ranks: int, times: float = 1.0) -> nn.Sequential:
    """Return one sleeper per stage, each `times` as long."""
    virtual = virtual_of(name)
    return nn.Sequential(*[Sleeper(virtual / times) for _ in range(ranks * virtual)])


def virtual_of(name: str) -> int:
    """Return the number of stages per rank."""
    return 2 if FAMILIES[name].virtual_stages == 2 else 1


def ours(rank: int, name: str, ranks: int, microbatches: int, elements: int, rounds: int) -> list[float]:
    """Return seconds from the first op's start to the last op's end over all ranks, per step."""
    x, y = batch(microbatches, elements)
    oversleep()
    virtual = virtual_of(name) if FAMILIES[name].chooses_virtual_stages else 1
    with Pipeline(
        model(name, ranks),
        loss,
        microbatches=microbatches,
        schedule=name,
        ranks=ranks,
        virtual_stages=virtual,
        execution=ExecutionOptions(check_finite=False),  # what sleeping stages hand back was never written to
    ) as pipe:
        found = [step_seconds(pipe, x, y) for _ in range(rounds + 1)]
    return found[1:]


def step_seconds(pipe: Pipeline, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return seconds of a step from the first op's start to the last op's end over all ranks, which begin it together."""
    _meet(pipe)
    pipe.step(x, y)
    trace = pipe.trace()
    begin = trace.info["origin"]
    ends = torch.tensor([begin, -(begin + float(trace.end.max()))], dtype=torch.float64)
    if pipe.in_processes:  # perf_counter is one clock for all processes of a machine
        dist.all_reduce(ends, dist.ReduceOp.MIN)
    return -ends[1].item() - ends[0].item()


def _meet(pipe: Pipeline) -> None:
    """Wait until one moment on every rank: ranks leave a collective at times that differ by more than a link's latency."""
    if pipe.world is not None:  # perf_counter is one clock for all processes of a machine
        nap_until(max(pipe.world.gather(time.perf_counter(), "run", "begin a step")) + SPREAD)


def peer(rank: int, name: str, ranks: int, microbatches: int, elements: int, rounds: int) -> list[float]:
    """Return the seconds of a step by torch.distributed.pipelining, on the slowest rank."""
    kind, several = SCHEDULES[name]
    virtual = virtual_of(name)
    stages = ranks * virtual
    net, (x, y) = model(name, ranks), batch(microbatches, elements)
    mine = [rank, stages - 1 - rank] if name == "zb-v" else list(range(rank, stages, ranks))
    parts = [PipelineStage(net[s], s, stages, torch.device("cpu")) for s in mine]
    schedule = kind(parts if several else parts[0], microbatches, loss_fn=loss)
    found = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        schedule.step(
            *((x,) if 0 in mine else ()), **({"target": y, "losses": []} if stages - 1 in mine else {})
        )
        seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append(seconds.item())
    return found[1:]


def alone(name: str, elements: int, times: float = 1.0) -> dict[str, float]:
    """Return seconds of the ops of a stage `times` as long when nothing else runs: the sleep, and the call of the stage."""
    virtual = virtual_of(name) / times
    stage = Stage(0, StageModule([Layer("0", lambda: Sleeper(virtual))]))
    seconds: dict[str, list[float]] = {"F": [], "I": [], "W": [], "B": []}

    def timed(kind: str, call: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        call()
        seconds[kind].append(time.perf_counter() - begin)

    grad = (Message((torch.ones(1, elements),)),)
    for n in range(24):
        x = (Message((torch.zeros(1, elements),), None, (True,)),)
        timed("F", partial(stage.forward, n, x, split=n % 2 == 1))
        if n % 2:
            timed("I", partial(stage.backward_input, n, grad))
            timed("W", partial(stage.backward_weight, n))
        else:
            timed("B", partial(stage.backward, n, grad))
    return {kind: statistics.median(found[2:]) for kind, found in seconds.items()}


def predicted(name: str, ranks: int, microbatches: int, each: dict[str, float]) -> float:
    """Return the simulator's makespan in seconds, from the times of a stage's ops."""
    virtual = virtual_of(name)
    schedule = build_schedule(name, ranks, microbatches, virtual)
    f, b, w, full = (each[kind] * virtual for kind in ("F", "I", "W", "B"))
    return float(makespan(simulate(lower(schedule), Costs.of(schedule.placement, f, b, w, full=full))))


def measure(options: argparse.Namespace) -> Figures:
    """Measure every schedule with every number of ranks and message size."""
    torch.set_num_threads(1)
    names, counts = (("1f1b",), (4,)) if options.quick else (SCHEDULE_NAMES, (2, 4, 8))
    rows = []
    yield f"{'schedule':18}{'p':>3}{'m':>4}  {'size':6}{'threads':>9}{'processes':>11}{'peer':>8}  (over the simulator)"
    with LocalProcesses(max(counts)) as pool:
        for name, p, size in product(names, counts, SIZES):
            m, elements = 4 * p, SIZES[size]
            ideal = predicted(name, p, m, alone(name, elements))
            job = (name, p, m, elements, options.rounds)
            row: dict[str, Any] = {"schedule": name, "ranks": p, "microbatches": m, "size": size}
            row["threads"] = statistics.median(ours(0, *job)) / ideal
            row["processes"] = statistics.median(pool.run(p, ours, *job, timeout=300)[0]) / ideal
            row["peer"] = None
            if name in SCHEDULES:
                row["peer"] = statistics.median(pool.run(p, peer, *job, timeout=300)[0]) / ideal
            rows.append(row)
            theirs = f"{row['peer']:8.3f}" if row["peer"] else f"{'-':>8}"
            yield f"{name:18}{p:3}{m:4}  {size:6}{row['threads']:9.3f}{row['processes']:11.3f}{theirs}"
    yield f"median of {options.rounds} steps"
    middle = {k: statistics.median(r[k] for r in rows if r[k]) for k in ("processes", "peer")}
    return {
        "ours": middle["processes"],
        "peer": middle["peer"],
        "ratio": middle["processes"] / middle["peer"],
        "rows": rows,
    }


if __name__ == "__main__":
    main(measure, __doc__, rounds=5)
