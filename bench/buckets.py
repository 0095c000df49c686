"""Sums of two replicas' gradients: ours, torch's DistributedDataParallel, and a blocking reduction.

Two gloo processes train copies of the 8-block model (blocks of width 256, sequences of 128, 16 per replica). A step is
zero_grad, forward, backward and reduction. Exposed communication is the time of a step minus that of one without reduction.

With --sleep, the computation sleeps and the link is slowed, so that neither takes a core from the other. Each of 24 layers
takes its share of 240 ms in the backward, and of half that in the forward. The link is busy for a given ratio of the
backward. The part that can be hidden is what a link that never idles would hide: none of the last bucket.

    python -m bench.buckets [--rounds N] [--bucket-mib N] [--sleep] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.compare import Figures, alternate, main, ratio
from bench.peer import Job
from bench.sleep import nap_until, oversleep
from penstock.parallel.replicas.buckets import GradientBuckets
from penstock.parallel.replicas.reducer import GroupReducer, Handle
from penstock.runtime.workers.pool import LocalProcesses

RANKS = 2
LAYERS, ELEMENTS = 24, 1 << 16
BACKWARD, FORWARD = 0.240, 0.120
RATIOS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.5)
CLAIMED = 0.6


def timed(step: Callable[[], object]) -> float:
    """Return the seconds until the slower replica is done."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


class Blocking(GroupReducer):
    """Waits for each reduction where it begins."""

    def all_reduce(self, flat: Tensor) -> Handle:
        handle = super().all_reduce(flat)
        handle.wait()
        return handle


def reduced(
    net: nn.Module, reducer: GroupReducer, bucket_bytes: int, loss: Callable[[], Tensor]
) -> Callable[[], None]:
    """Run a step with our reduction, as a pipeline of one rank and one microbatch does."""
    buckets = GradientBuckets(net.named_parameters(), reducer, bucket_bytes=bucket_bytes)
    buckets.attach()
    once = {e.parameter: 1 for e in buckets.entries}
    numbers = itertools.count(1)

    def step() -> None:
        net.zero_grad()
        number = next(numbers)
        buckets.begin(once, number)
        (loss() / RANKS).backward()
        buckets.finish()
        if number == 1:
            buckets.rebuild()

    return step


def contest(rank: int, rounds: int, mib: float, sequence: int) -> dict[str, list[float]]:
    """Time steps of all contestants in turn."""
    job = Job(blocks=8, width=256, sequence=sequence, microbatches=8, rows=4, schedule="1f1b")
    x, y = (part.chunk(RANKS)[rank] for part in job.batch())
    size = int(mib * (1 << 20))
    runs: dict[str, Callable[[], None]] = {}
    for name in ("ours", "blocking"):
        net = job.model()
        reducer = (Blocking if name == "blocking" else GroupReducer)(dist.new_group(), 60.0)
        runs[name] = reduced(net, reducer, size, lambda net=net: nn.functional.mse_loss(net(x), y))
    for name in ("ddp", "without"):
        net = job.model()
        if name == "ddp":
            net = DistributedDataParallel(
                net, bucket_cap_mb=mib, gradient_as_bucket_view=True, process_group=dist.new_group()
            )

        def step(net: nn.Module = net) -> None:
            net.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()

        runs[name] = step
    return alternate({name: (lambda run=run: timed(run)) for name, run in runs.items()}, rounds)


class _Slept:
    """A handle that is done when the reduction is, and the link has had its time for it."""

    def __init__(self, handle: Handle, due: float) -> None:
        self.handle, self.due = handle, due

    def wait(self) -> None:
        self.handle.wait()
        nap_until(self.due)


class SlowLink(GroupReducer):
    """A link that carries one reduction after another, each for a time proportional to its bytes."""

    def __init__(self, seconds_per_byte: float, group: dist.ProcessGroup, blocking: bool) -> None:
        super().__init__(group, 60.0)
        self.seconds_per_byte = seconds_per_byte
        self.waits = blocking
        self.free_at = 0.0

    def all_reduce(self, flat: Tensor) -> Handle:
        handle = super().all_reduce(flat)
        seconds = flat.numel() * flat.itemsize * self.seconds_per_byte
        self.free_at = max(time.perf_counter(), self.free_at) + seconds
        slept = _Slept(handle, self.free_at)
        if self.waits:
            slept.wait()
        return slept


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        nap_until(time.perf_counter() + FORWARD / LAYERS)
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        nap_until(time.perf_counter() + BACKWARD / LAYERS)
        (weight,) = ctx.saved_tensors
        return grad, torch.ones_like(weight)


class Sleeper(nn.Module):
    """A layer that sleeps, with a weight whose gradient is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(x, self.weight)
        return out


def sleeping(rank: int, share: float, rounds: int) -> dict[str, list[float]]:
    """Time steps of sleeping replicas whose link is busy for `share` of the backward."""
    oversleep()
    total = LAYERS * ELEMENTS * 4
    x = torch.ones(1)
    runs: dict[str, Callable[[], None]] = {}
    for name in ("ours", "blocking", "without"):
        net = nn.Sequential(*[Sleeper() for _ in range(LAYERS)])
        if name == "without":

            def step(net: nn.Module = net) -> None:
                net.zero_grad()
                net(x).sum().backward()

            runs[name] = step
            continue
        link = SlowLink(share * BACKWARD / total, dist.new_group(), blocking=name == "blocking")
        runs[name] = reduced(net, link, total // LAYERS, lambda net=net: net(x).sum())
    return alternate({name: (lambda run=run: timed(run)) for name, run in runs.items()}, rounds)


def hideable(share: float) -> float:
    """Return the part of a reduction of `share` x BACKWARD, layer by layer, that a link which never idles hides."""
    each, free = share * BACKWARD / LAYERS, 0.0
    for layer in range(1, LAYERS + 1):
        free = max(free, layer * BACKWARD / LAYERS) + each
    return (BACKWARD + share * BACKWARD - free) / (share * BACKWARD)


def real(pool: LocalProcesses, rounds: int, mib: float, sequence: int) -> Figures:
    """Measure ours beside DDP and the blocking version."""
    times = pool.run(RANKS, contest, rounds, mib, sequence, timeout=600)[0]
    exposed = {
        name: statistics.median(a - b for a, b in zip(times[name], times["without"], strict=True))
        for name in ("ours", "ddp", "blocking")
    }
    step = {name: statistics.median(seconds) for name, seconds in times.items()}
    result = {
        "ours": step["ours"],
        "peer": step["ddp"],
        "ratio": ratio(times["ours"], times["ddp"]),
        "steps": step,
        "exposed": exposed,
        "exposed over blocking": exposed["ours"] / exposed["blocking"],
    }
    yield f"{'':10}{'step':>10}{'exposed':>10}  (seconds)"
    for name in ("ours", "ddp", "blocking", "without"):
        hidden = f"{exposed[name]:10.4f}" if name in exposed else ""
        yield f"{name:10}{step[name]:10.4f}{hidden}"
    yield f"step, ours over DDP: {result['ratio']:.3f} (median of {rounds} rounds, one by one)"
    yield f"exposed, ours over blocking: {result['exposed over blocking']:.3f}"
    yield f"buckets of {mib:g} MiB, the first of 1"
    return result


def slept(pool: LocalProcesses, rounds: int, ratios: tuple[float, ...]) -> Figures:
    """Measure the share of the reduction that is hidden, and the throughput it gains, by ratio."""
    rows = []
    yield f"{'communication/backward':>22}{'blocking':>10}{'ours':>8}{'without':>9}{'hidden':>9}{'throughput':>12}"
    for share in ratios:
        times = pool.run(RANKS, sleeping, share, rounds, timeout=600)[0]
        step = {name: statistics.median(seconds) for name, seconds in times.items()}
        saved = statistics.median(
            (a - b) / (a - c)
            for a, b, c in zip(times["blocking"], times["ours"], times["without"], strict=True)
        )
        row = {
            "ratio": share,
            **step,
            "hidden": saved / hideable(share),  # of the reduction as the blocking steps show it
            "throughput": ratio(times["blocking"], times["ours"]) - 1,
        }
        rows.append(row)
        yield (
            f"{share:22.1f}{step['blocking']:10.3f}{step['ours']:8.3f}{step['without']:9.3f}"
            f"{row['hidden']:9.1%}{row['throughput']:+12.1%}"
        )
    yield f"hidden: of what can be; throughput: over blocking, the forward taking {FORWARD / BACKWARD:g} of the backward"
    at = next((row for row in rows if row["ratio"] == CLAIMED), rows[0])
    return {"rows": rows, "hidden": min(row["hidden"] for row in rows), "at": at}


def measure(options: argparse.Namespace) -> Figures:
    """Measure computing replicas, or sleeping ones."""
    with LocalProcesses(RANKS) as pool:
        if options.sleep:
            result = yield from slept(pool, options.rounds, (CLAIMED,) if options.quick else RATIOS)
        else:
            sequence = 16 if options.quick else 128
            result = yield from real(pool, options.rounds, options.bucket_mib, sequence)
    return {**result, "rounds": options.rounds}


def add(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--bucket-mib", type=float, default=25.0)
    parser.add_argument("--sleep", action="store_true", help="sleep instead of computing, on a slowed link")


if __name__ == "__main__":
    main(measure, __doc__, rounds=9, add=add)
