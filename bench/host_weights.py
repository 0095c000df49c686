"""Weights in host memory or on disk: equality with plain PyTorch, bytes on the device, step time, and a limit of memory.

A small decoder takes five steps with weights in a store, on threads and on processes, and the same steps as a plain loop of
PyTorch. Differences are the largest of a loss and of a weight after the last step, absolute. Bytes are those of weights and
gradients on the fullest rank, read in every forward and after every gradient, beside what `penstock.schedule.residency`
proves from the schedule alone. On a CPU the device is a window of buffers in host memory, which the ops read.

Step times are ratios over a pipeline whose weights are resident, taken in turn, for several rows of a batch: more rows
compute longer for the same copies.

At last a model of three times a limit of private memory (RLIMIT_DATA, which files do not count in) trains with AdamW in a
process of its own, from disk and in plain PyTorch. Both give freed memory back at once (MALLOC_MMAP_THRESHOLD_).

    python -m bench.host_weights [--link] [--rounds N] [--quick] [--json]

With --link nothing of this is measured, but steps beside slowed copies: in this bench alone, one of n bytes takes n / rate
seconds, most of them asleep. Resident steps and steps with a store, forward and backward, weights from host memory and
gradients to it, are taken in turn, and the quickest of each are compared, which other programs disturbed least. Beside them
stands the resident step and what the simulator adds to it, which knows the seconds of its ops, and the rate. Layers that
sleep show what runs beside what; layers that compute also the noise of cores that compute.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.compare import Figures, alternate, main, ratio
from bench.sleep import nap_until
from penstock.base.counts import plural
from penstock.parallel.host_store.memory import HostMemory
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.check import check
from penstock.schedule.memory import Budget, WeightBytes
from penstock.schedule.ops import Kind
from penstock.schedule.residency import make_residency
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.stage.layers import Layer
from penstock.trace.bubbles import makespan
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
LINKED_STAGES, MATRIX, SLEEPING_ROWS, COMPUTING_ROWS = 4, 512, 4, 1024
"""Stages of the model with slowed copies, the side of its matrices, and rows of a microbatch."""
NAP = 0.025
"""Seconds of a sleeping layer's forward."""
RATIOS = {"sleeps": (0.5, 1.0, 2.0, 4.0), "computes": (0.5, 2.0)}
"""Seconds of a stage's forwards over those of its fetch."""
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


class Worker(nn.Module):
    """A layer of one matrix whose ops take some milliseconds: of computation, or asleep."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(MATRIX, MATRIX, bias=False)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Nap.apply(x)) if self.kind == "sleeps" else self.linear(x)


class Nap(torch.autograd.Function):
    """The identity, which sleeps in the forward, and twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        nap_until(perf_counter() + NAP)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        nap_until(perf_counter() + 2 * NAP)
        return grad


@contextmanager
def link_of(rate: Callable[[], float]) -> Iterator[None]:
    """Have each copy between a device and a store take its bytes over a rate in bytes per second, or longer.

    Gradients have room of their own in host memory, as those of a GPU have, so that they are copied there.
    """
    copy = HostMemory.copy

    def slowed(self: HostMemory, target: Tensor, source: Tensor) -> None:
        until = perf_counter() + target.nbytes / rate()
        copy(self, target, source)
        nap_until(until)

    HostMemory.copy, HostMemory.on_disk = slowed, True  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostMemory.copy, HostMemory.on_disk = copy, False  # type: ignore[method-assign]


def linked(kind: str, ranks: int, window: int, ratios: Sequence[float], rounds: int) -> list[dict[str, Any]]:
    """Return resident steps and steps with a store, measured in turn and predicted, for ratios of compute to link."""
    row: Row = ("threads", ranks, "breadth-first", LINKED_STAGES // ranks, {})
    options = {"store": "host", "window": window}
    x = torch.randn(MICROBATCHES * (SLEEPING_ROWS if kind == "sleeps" else COMPUTING_ROWS), MATRIX)
    blocks = [[Worker(kind) for _ in range(LINKED_STAGES)] for _ in range(2)]
    size, rate, found = 4 * MATRIX**2, 1e12, []
    ops: list[np.ndarray] = []
    with (
        link_of(lambda: rate),
        pipeline(row, blocks[0], nn.functional.mse_loss) as resident,
        pipeline((*row[:4], options), blocks[1], nn.functional.mse_loss) as stored,
    ):
        alone = check(resident.schedule).program
        beside = check(stored.schedule, sharding=ParallelOptions(**options).sharding).program

        def step(of: Pipeline) -> float:
            began = perf_counter()
            of.step(x, x)
            took = perf_counter() - began
            of.zero_grad()
            if of is resident:
                ops.append(op_seconds(of))
            return took

        def added(seconds: np.ndarray) -> float:
            copies = np.full(LINKED_STAGES, size / rate)
            with_copies = simulate(beside, Costs(seconds, gather=copies, reduce=copies))
            return float(makespan(with_copies) - makespan(simulate(alone, Costs(seconds))))

        contestants = {"resident": partial(step, resident), "stored": partial(step, stored)}
        alternate(contestants, 2)
        for compute_over_link in ratios:
            forwards = MICROBATCHES * min(float(each[:, Kind.F].mean()) for each in ops)
            rate = size * compute_over_link / forwards
            ops.clear()
            taken = {name: min(each) for name, each in alternate(contestants, rounds).items()}
            # Each the quickest, which other programs disturbed least.
            predicted = taken["resident"] + added(min(ops, key=np.sum))
            found.append({
                "kind": kind, "ranks": ranks, "window": window, "forwards over fetch": compute_over_link,
                "fetch": size / rate, "resident": taken["resident"],
                "stored over resident": taken["stored"] / taken["resident"],
                "predicted": predicted / taken["resident"], "error": taken["stored"] / predicted - 1,
            })  # fmt: skip
    return found


def op_seconds(pipe: Pipeline) -> np.ndarray:
    """Return the mean seconds of the last step's ops, shape (stages, kinds)."""
    trace = pipe.trace()
    assert trace is not None, "a step was taken"
    table = np.zeros((pipe.schedule.stages, len(Kind)))
    for stage in range(pipe.schedule.stages):
        for kind in (Kind.F, Kind.B):
            rows = (trace.stage == stage) & (trace.kind == kind)
            table[stage, kind] = (trace.end - trace.start)[rows].mean()
    return table


def measure_link(quick: bool, rounds: int) -> Figures:
    """Measure steps with slowed copies beside the simulator's."""
    # Two ranks that compute would share two cores with the copies of both.
    counts = {"sleeps": (1, 2), "computes": (1,)}
    cases = [
        (kind, ranks, window)
        for kind in RATIOS
        for ranks in counts[kind]
        for window in range(1, min(3, LINKED_STAGES // ranks) + 1)
    ]
    yield "layers   ranks window  forwards/fetch  fetch ms  resident ms  stored/resident  predicted  error"
    found = []
    for kind, ranks, window in cases[1:2] if quick else cases:
        for each in linked(kind, ranks, window, (1.0,) if quick else RATIOS[kind], rounds):
            found.append(each)
            yield (
                f"{kind:8}{ranks:6}{window:7}{each['forwards over fetch']:16.2g}{each['fetch'] * 1e3:10.1f}"
                f"{each['resident'] * 1e3:13.1f}{each['stored over resident']:17.3f}{each['predicted']:11.3f}"
                f"{each['error']:+7.1%}"
            )
    errors: dict[str, list[float]] = {}
    for each in found:
        errors.setdefault(each["kind"], []).append(abs(each["error"]))
    for kind, each in errors.items():
        yield (
            f"a layer {kind}: {len(each)} cases, error {statistics.median(each):.1%} in the median, {max(each):.1%} at "
            f"most; quickest of {plural(rounds, 'step')}"
        )
    return {"rows": found, "errors": {kind: max(each) for kind, each in errors.items()}}


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
    if options.link:
        return (yield from measure_link(options.quick, options.rounds))
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
    return {
        "rows": rows,
        "off": worst,
        "ratios": ratios,
        "limited": runs,
        "rounds": options.rounds,
    }


if __name__ == "__main__":
    main(
        measure,
        __doc__,
        rounds=5,
        add=lambda parser: parser.add_argument("--link", action="store_true", help="slowed copies alone"),
    )
