"""The same model and schedule through Penstock and through its peers, in turn in the same processes.

The peers are torch.distributed.pipelining and, in threads, torchgpipe. torchgpipe is made for GPUs: on CPUs its forwards
run in one thread per stage, but all its backwards in one, because autograd has one thread for all CPU work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torchgpipe import GPipe

from bench.compare import alternate
from penstock.runtime.pipeline import Pipeline

SCHEDULES = {
    "gpipe": (ScheduleGPipe, False),
    "1f1b": (Schedule1F1B, False),
    "breadth-first": (ScheduleLoopedBFS, True),
    "interleaved-1f1b": (ScheduleInterleaved1F1B, True),
    "interleaved-zb": (ScheduleInterleavedZeroBubble, True),
    "zb-v": (ScheduleZBVZeroBubble, True),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and its split.

    Attributes:
        blocks, width, sequence: sizes of the model; a transformer, or if `tiny` one linear layer per block.
        microbatches, rows: a step has microbatches * rows sequences.
        schedule, virtual: schedule, and number of stages per rank.
        device, dtype: where the model and the batch are, and their dtype.
    """

    blocks: int
    width: int
    sequence: int
    microbatches: int
    rows: int
    schedule: str
    virtual: int = 1
    tiny: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def model(self) -> nn.Sequential:
        """Return the blocks, the same on every call."""
        torch.manual_seed(0)
        if self.tiny:
            blocks: list[nn.Module] = [nn.Linear(self.width, self.width) for _ in range(self.blocks)]
        else:
            blocks = [
                nn.TransformerEncoderLayer(
                    self.width, 8, 4 * self.width, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(self.blocks)
            ]
        return nn.Sequential(*blocks).to(self.device, self.dtype)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return input and target of one step."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.microbatches * self.rows, self.sequence, self.width)
        x, y = (torch.randn(shape, generator=generator) for _ in range(2))
        return x.to(self.device, self.dtype), y.to(self.device, self.dtype)

    def synchronize(self) -> None:
        """Wait for what the device has been given."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def ranks_on(device: str, ranks: int) -> int:
    """Return the number of processes for these ranks: NCCL takes one for each device, and one process has all stages."""
    return ranks if device == "cpu" or torch.cuda.device_count() >= ranks else 1


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the argument that says where the contestants compute."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to compute (default cpu)"
    )


def timed(job: Job, step: Callable[[], object]) -> float:
    """Return the seconds of one call, what it leaves to the device included."""
    job.synchronize()
    begin = perf_counter()
    step()
    job.synchronize()
    return perf_counter() - begin


def single_step(job: Job, microbatches: int) -> Callable[[], None]:
    """Return a step of the unsplit model over the first `microbatches` of the batch."""
    net, (x, y) = job.model(), job.batch()
    parts = list(zip(x.chunk(job.microbatches), y.chunk(job.microbatches), strict=True))[:microbatches]

    def step() -> None:
        for a, b in parts:
            (nn.functional.mse_loss(net(a), b) / job.microbatches).backward()

    return step


def plain_step(job: Job, threads: int) -> Callable[[], None]:
    """Return a step of the unsplit model over the whole batch at once, each operation on this many threads."""
    net, (x, y) = job.model(), job.batch()

    def step() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        nn.functional.mse_loss(net(x), y).backward()
        torch.set_num_threads(before)

    return step


def peer_step(job: Job, rank: int, ranks: int) -> Callable[[], None]:
    """Return a step through torch.distributed.pipelining."""
    kind, several = SCHEDULES[job.schedule]
    net, (x, y) = job.model(), job.batch()
    stages = ranks * job.virtual
    each = job.blocks // stages
    v_shaped = job.schedule == "zb-v"
    mine = [rank, stages - 1 - rank] if v_shaped else list(range(rank, stages, ranks))
    # Ranks on devices talk over NCCL; the processes here meet over gloo.
    group = dist.new_group(backend="cpu:gloo,cuda:nccl") if job.device == "cuda" else None
    parts = [
        PipelineStage(
            nn.Sequential(*net[s * each : (s + 1) * each]), s, stages, torch.device(job.device), group=group
        )
        for s in mine
    ]
    schedule = kind(parts if several else parts[0], job.microbatches, loss_fn=nn.functional.mse_loss)
    last = stages - 1 in mine

    def step() -> None:
        schedule.step(*((x,) if 0 in mine else ()), **({"target": y, "losses": []} if last else {}))

    return step


def torchgpipe_step(job: Job, ranks: int) -> Callable[[], None]:
    """Return a step through torchgpipe: one stage per rank, GPipe without recompute."""
    net, (x, y) = job.model(), job.batch()
    pipe = GPipe(
        net,
        [job.blocks // ranks] * ranks,
        devices=[job.device if job.device == "cpu" else f"{job.device}:0"] * ranks,
        chunks=job.microbatches,
        checkpoint="never",
    )

    def step() -> None:
        nn.functional.mse_loss(pipe(x), y).backward()

    return step


def race(rank: int, ranks: int, jobs: dict[str, tuple[str, Job]], rounds: int) -> dict[str, list[float]]:
    """Time contestants in turn; the slowest rank counts.

    Args:
        rank, ranks: rank of this process, and number of ranks.
        jobs: name → ("ours", "peer", "half" or "plain", job); with "half" every process computes its share of the
            microbatches alone on the unsplit model, which bounds the time of any pipeline; with "plain" the first process
            computes all of the batch on the unsplit model, with as many threads as there are ranks, and the others none.
        rounds: number of rounds.
    """
    pipes, runs = [], {}
    if next(iter(jobs.values()))[1].device == "cuda":
        torch.cuda.set_device(rank)
    for name, (who, job) in jobs.items():
        if who == "ours":
            virtual = job.virtual if job.schedule != "zb-v" else 1
            pipe = Pipeline(
                job.model(), nn.functional.mse_loss, microbatches=job.microbatches, schedule=job.schedule,
                ranks=ranks, virtual_stages=virtual, device=job.device,
            )  # fmt: skip
            x, y = job.batch()
            pipes.append(pipe)
            runs[name] = lambda pipe=pipe, x=x, y=y: pipe.step(x, y)
        elif who == "peer":
            runs[name] = peer_step(job, rank, ranks)
        elif who == "plain":
            runs[name] = plain_step(job, ranks) if rank == 0 else lambda: None
        else:
            runs[name] = single_step(job, job.microbatches // ranks)

    def slowest(step: Callable[[], object]) -> float:
        job.synchronize()
        dist.barrier()
        seconds = torch.tensor([timed(job, step)], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    times = alternate({name: (lambda run=run: slowest(run)) for name, run in runs.items()}, rounds)
    for pipe in pipes:
        pipe.close()
    return times
