"""Sharded gradients and weights in a pipeline: bytes, gathers, equality with ZeRO-1, and its step time; FSDP2 beside.

A small built-in decoder takes steps on the same global batches with ZeRO-1 and with what each row says, in the same
processes. Bytes are those of weights and gradients on the fullest rank, at the fullest moment of a step, beside what
`penstock.schedule.residency` proves from the schedule alone. Gathers are those of the last step's trace, beside those of the
Program. Differences are the largest of a loss, relative, and of a weight after the last step, absolute. Times are
medians of steps taken in turn. Four processes of FSDP2, one block a unit, train the same model without a pipeline; gloo
makes a reduce-scatter of an all-reduce (pytorch #149869), so on CPUs that race says little about GPUs. At last a model
trains in processes that may not have more memory than a limit, in which ZeRO-1 fails.

    python -m bench.residency [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.compare import Figures, alternate, main, ratio
from penstock.base.errors import PenstockError
from penstock.parallel.mesh import MeshShape
from penstock.parallel.replicas.resident import ResidentReduction
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.residency import make_residency
from penstock.trace.events import Activity
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

CONFIG = ModelConfig(vocabulary=512, width=128, layers=8, heads=4, kv_heads=2, hidden=512)
ROWS_OF_BATCH, TOKENS, STEPS = 16, 32, 3
TWO, FOUR = MeshShape(2, 2), MeshShape(1, 4)
Row = tuple[MeshShape, str, int | None, dict[str, Any]]
ROWS: tuple[Row, ...] = (
    (TWO, "interleaved-1f1b", 4, {"shard": "weights", "window": 1}),
    (TWO, "interleaved-1f1b", 4, {"shard": "weights", "window": 2}),
    (TWO, "interleaved-1f1b", 4, {"shard": "gradients", "reduce_every": 2}),
    (TWO, "breadth-first", 4, {"shard": "weights", "window": 1}),
    (TWO, "breadth-first", 4, {"shard": "gradients"}),
    (TWO, "zb-v", None, {"shard": "weights", "window": 1}),
    (TWO, "zb-v", None, {"shard": "weights"}),
    (TWO, "gpipe", None, {"shard": "weights"}),
    (FOUR, "breadth-first", 8, {"shard": "weights", "window": 1}),
    (FOUR, "interleaved-1f1b", 8, {"shard": "weights", "window": 2}),
)
LIMIT = 0.6
"""Memory that a process may get once its model is built, over the bytes of its weights: ZeRO-1 needs as much again for the
gradients, and sharded weights and gradients, of eight stages over four replicas, give back more than they need."""


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of a step's global batch."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(CONFIG.vocabulary, (ROWS_OF_BATCH, TOKENS + 1), generator=generator)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


class Contestant:
    """A pipeline and its optimizer, and what its steps hold and do."""

    def __init__(self, mesh: MeshShape, schedule: str, virtual: int | None, sharding: dict[str, Any]) -> None:
        self.pipe = Pipeline(
            layers(CONFIG), next_token_loss, microbatches=ROWS_OF_BATCH // 2 // mesh.dp, schedule=schedule,
            virtual_stages=virtual, mesh=mesh, timeout=300, parallel=ParallelOptions(bucket_bytes=1 << 18, **sharding),
        )  # fmt: skip
        self.sizes = {
            stage: sum(p.nbytes for p in module.parameters())
            for stage, module in zip(sorted(self.pipe.stages), self.pipe.stage_modules(), strict=True)
        }
        self.optimizer = PipelineOptimizer(self.pipe, torch.optim.AdamW, lr=1e-3, zero=True)
        self.peak = 0
        reduction = self.pipe._local.replica_reduction
        if isinstance(reduction, ResidentReduction):
            self._watch(reduction)
        self.losses: list[float] = []

    def _watch(self, reduction: ResidentReduction) -> None:
        resident = reduction.resident
        buckets = resident.buckets

        def look() -> None:
            self.peak = max(self.peak, sum(bucket.bytes for bucket in buckets))

        def looking(call: Callable[..., None]) -> Callable[..., None]:
            def run(*args: int) -> None:
                look()
                call(*args)
                look()

            return run

        # Every moment at which weights or gradients come or go, and the end of every op.
        for name, call in (
            ("reshard", resident.reshard),
            ("complete", resident.complete),
            ("settle", resident.settle),
        ):
            setattr(resident, name, looking(call))
        self.pipe.wrap_ops(lambda _, op: looking(op))

    def step(self, number: int) -> float:
        """Take a step, and return its seconds."""
        dist.barrier()
        began = perf_counter()
        self.losses.append(float(self.pipe.step(*batch(number)).loss))
        self.optimizer.step()
        return perf_counter() - began


def on_mesh(rank: int, row: Row, steps: int, rounds: int) -> dict[str, Any]:
    """Train with ZeRO-1 and with what a row says, in one process of the mesh."""
    torch.set_num_threads(1)
    mesh, schedule, virtual, sharding = row
    ours, zero = Contestant(*row), Contestant(mesh, schedule, virtual, {"shard": "optimizer"})
    try:
        for number in range(steps):
            ours.step(number)
            zero.step(number)
        trace = ours.pipe.trace()
        assert trace is not None, "steps were taken"
        gathers = len(trace.only([Activity.GATHER]))
        local = ours.pipe.schedule.rows(ours.pipe.rank)
        residency = make_residency(ours.pipe.schedule, ParallelOptions(**sharding).sharding)
        sizes = np.zeros(ours.pipe.schedule.stages, np.int64)
        for stage, size in ours.sizes.items():
            sizes[stage] = size
        proved = int(residency.held(ours.pipe.schedule, sizes, sizes, mesh.dp)[local].max())
        weights, wanted = ours.pipe.state_dict(), zero.pipe.state_dict()
        found = {
            "loss": max(abs(a / b - 1) for a, b in zip(ours.losses, zero.losses, strict=True)),
            "weight": max(float((weights[n] - wanted[n]).abs().max()) for n in wanted),
            "bytes": ours.peak, "formula": proved, "zero": sum(2 * size for size in ours.sizes.values()),
            "gathers": gathers, "of program": len(residency.runs[ours.pipe.rank]),
        }  # fmt: skip
        found["times"] = alternate({"ours": lambda: ours.step(0), "zero": lambda: zero.step(0)}, rounds)
        return found
    finally:
        ours.pipe.close()
        zero.pipe.close()


def beside_fsdp2(rank: int, rounds: int) -> dict[str, list[float]]:
    """Train the model without a pipeline: with FSDP2, and with sharded weights of eight stages, on four processes."""
    torch.set_num_threads(1)
    ours = Contestant(FOUR, "breadth-first", 8, {"shard": "weights", "window": 2})
    mesh = init_device_mesh("cpu", (4,))
    net = nn.Sequential(*(layer.build() for layer in layers(CONFIG)))
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step() -> float:
        dist.barrier()
        began = perf_counter()
        x, y = (t.chunk(4)[rank] for t in batch(0))
        for number, (inputs, targets) in enumerate(zip(x.split(2), y.split(2), strict=True)):
            net.set_requires_gradient_sync(number == len(x) // 2 - 1)
            (next_token_loss(net(inputs), targets) / (len(x) // 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return perf_counter() - began

    try:
        return alternate({"ours": lambda: ours.step(0), "theirs": step}, rounds)
    finally:
        ours.pipe.close()


def limited(rank: int, sharding: dict[str, Any]) -> str:
    """Take two steps in a process that may not get more memory than `LIMIT` says, and return what happened."""
    torch.set_num_threads(1)
    width, depth = 3072, 8
    before = resource.getrlimit(resource.RLIMIT_DATA)
    torch.manual_seed(0)
    blocks = [(f"block {n}", nn.Linear(width, width, bias=False)) for n in range(depth)]
    try:
        with Pipeline(
            blocks, nn.functional.mse_loss, microbatches=2, schedule="breadth-first", virtual_stages=depth, mesh=FOUR,
            timeout=60, parallel=ParallelOptions(**sharding),
        ) as pipe:  # fmt: skip
            status = Path("/proc/self/status").read_text().splitlines()
            has = 1024 * int(next(line for line in status if line.startswith("VmData")).split()[1])
            more = int(LIMIT * 4 * depth * width * width)
            resource.setrlimit(resource.RLIMIT_DATA, (has + more, before[1]))
            optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=1e-3)
            x = torch.ones(8, width)
            for _ in range(2):
                loss = pipe.step(x, x).loss
                optimizer.step()
            return f"two steps, loss {float(loss):.4f}"
    except (PenstockError, RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def measure(options: argparse.Namespace) -> Figures:
    """Measure all rows."""
    yield (
        f"{'':70}{'bytes':>11}{'formula':>11}{'ZeRO-1':>11}{'gathers':>8}{'planned':>8}{'loss':>8}{'weight':>8}{'time':>6}"
    )
    rows: dict[str, dict[str, Any]] = {}
    with LocalProcesses(4) as pool:
        for row in ROWS[:2] if options.quick else ROWS:
            mesh, schedule, _, sharding = row
            told = pool.run(4, on_mesh, row, 1 if options.quick else STEPS, options.rounds, timeout=1200)
            name = f"{mesh}, {schedule}, {', '.join(f'{k} {v}' for k, v in sharding.items())}"
            fullest = max(told, key=lambda one: one["bytes"])
            found = rows[name] = {
                **{key: fullest[key] for key in ("bytes", "formula", "zero", "gathers", "of program")},
                **{key: max(one[key] for one in told) for key in ("loss", "weight")},
                "off": max(abs(one["bytes"] / one["formula"] - 1) for one in told),
                "as planned": all(one["gathers"] == one["of program"] for one in told),
                "time": ratio(told[0]["times"]["ours"], told[0]["times"]["zero"]),
            }
            yield (
                f"{name:70}{found['bytes']:11,}{found['formula']:11,}{found['zero']:11,}{found['gathers']:8}"
                f"{found['of program']:8}{found['loss']:8.0e}{found['weight']:8.0e}{found['time']:6.2f}"
            )
        beside = pool.run(4, beside_fsdp2, options.rounds, timeout=1200)[0]
        runs = {
            name: pool.run(4, limited, {"shard": name, **more}, timeout=600)[0]
            for name, more in (("weights", {"window": 1}), ("optimizer", {}))
        }
    worst = max(row["off"] for row in rows.values())
    planned = all(row["as planned"] for row in rows.values())
    over = ratio(beside["ours"], beside["theirs"])
    yield f"bytes beside the formula: {worst:.1%} at worst; gathers as planned on every rank: {planned}"
    yield (
        f"a step of {FOUR}, breadth-first, window 2, over FSDP2's: {over:.2f}; "
        f"{', '.join(f'{name} {statistics.median(times) * 1e3:.0f} ms' for name, times in beside.items())}"
    )
    yield f"with {LIMIT} times the weights to get: " + "; ".join(
        f"{name}: {what}" for name, what in runs.items()
    )
    return {
        "rows": rows,
        "off": worst,
        "as planned": planned,
        "over FSDP2": over,
        "limited": runs,
        "rounds": options.rounds,
    }


if __name__ == "__main__":
    main(measure, __doc__, rounds=5)
