"""Weights in host memory or on disk: equality with plain PyTorch, bytes on the device, step time, and a limit of memory.

A small decoder takes five steps with weights in a store, on threads and on processes, and the same steps as a plain loop of
PyTorch. Differences are the largest of a loss and of a weight after the last step, absolute. Bytes are those of weights and
gradients on the fullest rank, read in every forward and after every gradient, beside what `penstock.schedule.residency`
proves from the schedule alone. On a CPU the device is a window of buffers in host memory, which the ops read.

Step times are ratios over a pipeline whose weights are resident, taken in turn, for several rows of a batch: more rows
compute longer for the same copies. At last a model of three times a limit of private memory (RLIMIT_DATA, which files do
not count in) trains with AdamW in a process of its own, from disk and in plain PyTorch. Both give freed memory back at once
(MALLOC_MMAP_THRESHOLD_).

    python -m bench.host_weights [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.compare import Figures, alternate, main, ratio
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.memory import Budget, WeightBytes
from penstock.schedule.residency import make_residency
from penstock.stage.layers import Layer
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

CONFIG = ModelConfig(vocabulary=256, width=64, layers=8, heads=4, kv_heads=2, hidden=256)
ROWS_OF_BATCH, TOKENS, MICROBATCHES, STEPS = 8, 16, 4, 5
Row = tuple[str, int, str, int | None, dict[str, Any]]
ROWS: tuple[Row, ...] = (
    ("threads", 1, "breadth-first", 4, {"store": "host", "window": 1}),
    ("threads", 1, "breadth-first", 4, {"store": "disk", "window": 1}),
    ("processes", 2, "interleaved-1f1b", 2, {"store": "disk", "window": 1}),
    ("threads", 2, "zb-v", None, {"store": "disk", "window": 1}),
    ("threads", 2, "interleaved-1f1b", 2, {"store": "host", "window": 1, "reduce_every": 2}),
    ("processes", 2, "breadth-first", 4, {"store": "host", "window": 2}),
    ("processes", 4, "1f1b", None, {"store": "host", "window": 1}),
    ("processes", 4, "breadth-first", 2, {"store": "disk", "window": 1}),
)
DEEP, WIDTH = 40, 3072
"""Layers and width of the model that does not fit."""
LIMIT = 4 * WIDTH * WIDTH * DEEP // 3
"""Bytes of private memory that a process may have: a third of the model's weights."""


def batch(step: int, rows: int = ROWS_OF_BATCH) -> tuple[Tensor, Tensor]:
    """Return the tokens of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(CONFIG.vocabulary, (rows, TOKENS + 1), generator=generator)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def plain_steps() -> tuple[list[Tensor], dict[str, Tensor]]:
    """Take the steps in plain PyTorch; return the microbatches' losses by step, and the last weights."""
    with Pipeline(
        layers(CONFIG), next_token_loss, microbatches=MICROBATCHES
    ) as pipe:  # for its initial weights
        blocks = [(name, block) for module in pipe.stage_modules() for name, block in module.named_layers()]
    net = nn.Sequential(*(block for _, block in blocks))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        pairs = zip(*(t.chunk(MICROBATCHES) for t in batch(step)), strict=True)
        each = [next_token_loss(net(x), y) for x, y in pairs]
        for loss in each:
            (loss / MICROBATCHES).backward()
        losses.append(torch.stack([loss.detach() for loss in each]))
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {
        f"{name}.{inner}": p.detach() for name, block in blocks for inner, p in block.named_parameters()
    }


def pipeline(row: Row, given: Any = None, loss_fn: Any = next_token_loss) -> Pipeline:
    """Return a row's pipeline."""
    kind, ranks, schedule, virtual, options = row
    return Pipeline(
        layers(CONFIG) if given is None else given, loss_fn, microbatches=MICROBATCHES, schedule=schedule,
        ranks=ranks if kind == "threads" else None, virtual_stages=virtual, timeout=300,
        parallel=ParallelOptions(**options),
    )  # fmt: skip


def watch(pipe: Pipeline) -> dict[int, int]:
    """Return the most bytes of weights and gradients on the device by rank of this process, as steps go."""
    assert pipe.store is not None, "the row has one"
    most = dict.fromkeys(pipe.local_ranks, 0)

    def look(rank: int, *_: object) -> None:
        if rank in pipe.store.participants:
            most[rank] = max(most[rank], pipe.store.participants[rank].device_bytes)

    for rank in pipe.local_ranks:
        for stage in pipe.schedule.placement.stages_of[rank]:
            for layer in pipe.stages[stage].module.layers:
                layer.register_forward_hook(lambda *_, rank=rank: look(rank))
                for p in layer.parameters():
                    p.register_post_accumulate_grad_hook(partial(look, rank))
    return most


def formula(pipe: Pipeline, options: dict[str, Any], sizes: np.ndarray) -> list[int]:
    """Return the bytes that the schedule's memory code predicts, by rank."""
    residency = make_residency(pipe.schedule, ParallelOptions(**options).sharding)
    budget = Budget(limit=0, saved=0, weights=WeightBytes(sizes, sizes))
    return [int(n) for n in budget.peak(pipe.schedule, residency)]


def on_ranks(rank: int, row: Row) -> dict[str, Any]:
    """Take the steps of a row on this process's ranks."""
    torch.set_num_threads(1)
    with pipeline(row) as pipe:
        held = watch(pipe)
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-3, clip=0.5)
        losses = []
        for step in range(STEPS):
            losses.append(pipe.step(*batch(step)).losses)
            optimizer.step()
        sizes = torch.zeros(pipe.schedule.stages, dtype=torch.float64)
        for s, stage in pipe.stages.items():
            sizes[s] = sum(p.nbytes for p in stage.module.parameters())
        predicted = formula(pipe, row[-1], pipe.sum_over_ranks(sizes).numpy().astype(np.int64))
        return {
            "losses": losses, "weights": pipe.full_state_dict(), "resident": int(2 * max(
                sum(float(sizes[s]) for s in pipe.schedule.placement.stages_of[r]) for r in held)),
            "held": held, "formula": {r: predicted[r] for r in held},
        }  # fmt: skip


class Timed:
    """A pipeline of wide layers whose steps are timed."""

    def __init__(self, options: dict[str, Any], rows: int) -> None:
        blocks = [(f"block {n}", nn.Linear(1024, 1024)) for n in range(4)]
        row: Row = ("threads", 1, "breadth-first", 4, options)
        self.pipe = pipeline(row, blocks, nn.functional.mse_loss)
        self.optimizer = PipelineOptimizer(self.pipe, torch.optim.AdamW, lr=1e-3)
        self.x = torch.randn(rows, 1024)

    def step(self) -> float:
        """Take a step, and return its seconds."""
        began = perf_counter()
        self.pipe.step(self.x, self.x)
        self.optimizer.step()
        return perf_counter() - began


def times(rows: int, rounds: int) -> dict[str, float]:
    """Return the steps of both stores over a resident one, for the rows of a batch."""
    contestants = {
        name: Timed({} if name == "none" else {"store": name, "window": 1}, rows)
        for name in ("none", "host", "disk")
    }
    try:
        taken = alternate({name: each.step for name, each in contestants.items()}, rounds)
    finally:
        for each in contestants.values():
            each.pipe.close()
    found = {name: ratio(taken[name], taken["none"]) for name in ("host", "disk")}
    return {**found, "seconds": statistics.median(taken["none"])}


def limited(how: str, steps: int) -> None:
    """Train a model of three times the memory that this process may have; for a process of its own."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))

    def block(n: int) -> Layer:
        return Layer(f"block {n}", lambda: nn.Linear(WIDTH, WIDTH, bias=False))

    blocks, x = [block(n) for n in range(DEEP)], torch.ones(4, WIDTH)
    if how == "plain":
        net = nn.Sequential(*(each.build() for each in blocks))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for _ in range(steps):
            loss = nn.functional.mse_loss(net(x), x)
            loss.backward()
            optimizer.step()
    else:
        row: Row = ("threads", 1, "breadth-first", DEEP, {"store": "disk", "window": 1})
        with pipeline(row, blocks, nn.functional.mse_loss) as pipe:
            updates = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-3)
            for _ in range(steps):
                loss = pipe.step(x, x).loss
                updates.step()
    lines = Path("/proc/self/status").read_text().splitlines()
    private = 1024 * int(next(line for line in lines if line.startswith("VmData")).split()[1])
    print(f"loss {float(loss):.4f} in step {steps}, private memory {private / 1e6:.0f} MB")


def in_a_limit(how: str, steps: int) -> str:
    """Return what `limited` printed last in a process of its own."""
    code = f"from bench.host_weights import limited; limited({how!r}, {steps})"
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    errors = [line for line in lines if "Error" in line]
    return (lines if done.returncode == 0 else errors)[-1][:110]


def difference(pairs: Any) -> float:
    """Return the largest absolute difference of pairs of tensors."""
    return max(float((a - b).abs().max()) for a, b in pairs)


def measure(options: argparse.Namespace) -> Figures:
    """Measure all rows."""
    torch.set_num_threads(1)
    losses, weights = plain_steps()
    rows: dict[str, dict[str, Any]] = {}
    yield f"{'':72}{'loss':>7}{'weight':>8}{'bytes':>11}{'formula':>11}{'resident':>11}"
    with LocalProcesses(4) as pool:
        for row in ROWS[:3] if options.quick else ROWS:
            kind, ranks, schedule, virtual, chosen = row
            run: Callable[[], list[dict[str, Any]]] = partial(pool.run, ranks, on_ranks, row, timeout=1200)
            told = [on_ranks(0, row)] if kind == "threads" else run()
            pairs = [(one["held"][r], one["formula"][r]) for one in told for r in one["held"]]
            found = {
                "loss": max(difference(zip(one["losses"], losses, strict=True)) for one in told),
                "weight": max(difference((one["weights"][n], weights[n]) for n in weights) for one in told),
                "bytes": max(held for held, _ in pairs), "formula": max(bytes_ for _, bytes_ in pairs),
                "resident": max(one["resident"] for one in told),
                "off": max(abs(held / bytes_ - 1) for held, bytes_ in pairs),
            }  # fmt: skip
            stages = "" if virtual is None else f" v={virtual}"
            name = f"{kind} {ranks}, {schedule}{stages}, {', '.join(f'{k} {v}' for k, v in chosen.items())}"
            rows[name] = found
            yield (
                f"{name:72}{found['loss']:7.0e}{found['weight']:8.0e}{found['bytes']:11,}{found['formula']:11,}"
                f"{found['resident']:11,}"
            )
    worst = max(row["off"] for row in rows.values())
    yield f"bytes beside the formula: {worst:.1%} at worst of every rank"
    ratios: dict[int, dict[str, float]] = {}
    for count in (64,) if options.quick else (16, 64, 256, 1024):
        found = ratios[count] = times(count, options.rounds)
        yield (
            f"a step of {count} rows over the resident one: host {found['host']:.2f}, disk {found['disk']:.2f}; resident "
            f"{found['seconds'] * 1e3:.0f} ms"
        )
    runs = {how: in_a_limit(how, 1 if options.quick else 2) for how in ("plain", "disk")}
    yield (
        f"weights of {3 * LIMIT / 1e6:.0f} MB with {LIMIT / 1e6:.0f} MB of private memory, AdamW: "
        + "; ".join(f"{how}: {what}" for how, what in runs.items())
    )
    return {"rows": rows, "off": worst, "ratios": ratios, "limited": runs, "rounds": options.rounds}


if __name__ == "__main__":
    main(measure, __doc__, rounds=5)
