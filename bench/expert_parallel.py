"""Experts divided over processes: equality with one process, bytes, the exchange's share of a step, zero bubble over 1F1B.

A small built-in decoder with a mixture of experts in each block takes steps on the same global batches, in plain PyTorch on
one process and on each mesh. The largest differences are from plain PyTorch: of a loss and of a gradient of the first step
relative to the largest one, and of a weight after the last step. Bytes are those of weights, gradients and AdamW's state on
the fullest rank, beside the formula: 16 bytes a parameter in fp32, with the experts' divided by ep. The exchange is the
share of a step that the slowest process spends in the all-to-alls of tokens, waits for the others included.

    python -m bench.expert_parallel [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.compare import Figures, alternate, main, ratio
from penstock.parallel.dtensor import full_tensor, local
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.expert_exchange import ExpertExchange
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

CONFIG = ModelConfig(
    vocabulary=256, width=64, layers=4, heads=4, kv_heads=2, hidden=128, experts=8, experts_per_token=2
)
MESHES = (
    MeshShape(2, 2, 1, ep=2), MeshShape(1, 4, 1, ep=4), MeshShape(1, 4, 1, ep=2), MeshShape(2, 2, 2, ep=2),
    MeshShape(2, 2, 2, ep=4),
)  # fmt: skip
MICROBATCHES, ROWS, TOKENS, STEPS = 8, 1, 64, 5
State = dict[str, Tensor]


def batch(step: int) -> Tensor:
    """Return the tokens of a step's global batch."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(CONFIG.vocabulary, (MICROBATCHES * ROWS, TOKENS), generator=generator)


@cache
def alone(steps: int) -> dict[str, Any]:
    """Return the losses, the first gradients and the last weights of plain PyTorch on one process."""
    with Pipeline(layers(CONFIG), next_token_loss, microbatches=1, ranks=1) as pipe:
        net, named = pipe.stages[0].module, dict(pipe.named_parameters())
        optimizer = torch.optim.AdamW(named.values(), lr=1e-3)
        losses, first = [], {}
        for step in range(steps):
            total = 0.0
            for rows in batch(step).split(ROWS):
                loss = next_token_loss(net(rows), rows) / MICROBATCHES
                loss.backward()  # torch does not annotate it
                total += loss.item()
            losses.append(total)
            first = first or {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        return {
            "losses": losses,
            "gradients": first,
            "weights": {n: p.detach().clone() for n, p in named.items()},
        }


class Contestant:
    """A pipeline of one process, and what it found in its first step."""

    def __init__(self, mesh: MeshShape, schedule: str = "1f1b") -> None:
        self.pipe = Pipeline(
            layers(CONFIG),
            next_token_loss,
            microbatches=MICROBATCHES // mesh.dp,
            mesh=mesh,
            schedule=schedule,
            timeout=300,
        )
        self.optimizer = PipelineOptimizer(self.pipe, torch.optim.AdamW, lr=1e-3)
        self.losses: list[float] = []
        self.gradients: State = {}

    def step(self) -> float:
        """Return the seconds of a step and an update."""
        tokens = batch(self.pipe.steps)
        begin = perf_counter()
        loss = self.pipe.step(tokens, tokens).loss
        seconds = perf_counter() - begin
        assert loss is not None, "there are targets"
        self.losses.append(loss.item())
        if not self.gradients:
            grads = {n: p.grad for n, p in self.pipe.named_parameters() if p.grad is not None}
            self.gradients = {n: full_tensor(grad).clone() for n, grad in grads.items()}
        begin = perf_counter()
        self.optimizer.step()
        return seconds + perf_counter() - begin

    def weights(self) -> State:
        """Return copies of this rank's parameters, experts of all processes included; they all call it."""
        return {n: full_tensor(p.detach()).clone() for n, p in self.pipe.named_parameters()}


class Timed:
    """Sum of the seconds in `ExpertExchange.all_to_all` of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        inner = ExpertExchange.all_to_all

        def all_to_all(own: ExpertExchange, *args: Any) -> Tensor:
            begin = perf_counter()
            out = inner(own, *args)
            self.seconds += perf_counter() - begin
            return out

        self._inner = inner
        ExpertExchange.all_to_all = all_to_all  # type: ignore[method-assign]

    def stop(self) -> float:
        """Return the seconds, and time no more."""
        ExpertExchange.all_to_all = self._inner  # type: ignore[method-assign]
        return self.seconds


def on_mesh(rank: int, mesh: MeshShape, steps: int, rounds: int) -> dict[str, Any]:
    """Return losses, gradients, weights, bytes and the exchange's share of one process."""
    torch.set_num_threads(1)
    ours = Contestant(mesh)
    for _ in range(steps):
        ours.step()
    named = dict(ours.pipe.named_parameters())
    found: dict[str, Any] = {
        "losses": list(ours.losses),
        "gradients": ours.gradients,
        "weights": ours.weights(),
        "bytes": sum(2 * local(p).nbytes for p in named.values()) + ours.optimizer.state_bytes(),
        "parameters": {
            n: (p.numel(), True) if ".experts." in n else (local(p).numel(), False) for n, p in named.items()
        },
    }
    timed = Timed()
    seconds = sum(ours.step() for _ in range(rounds))
    ours.pipe.close()
    return {**found, "exchange": timed.stop() / seconds}


def schedules(rank: int, mesh: MeshShape, rounds: int) -> dict[str, list[float]]:
    """Return the times of steps by schedule."""
    torch.set_num_threads(1)
    both = {name: Contestant(mesh, name) for name in ("1f1b", "zb-h1")}
    for one in both.values():
        one.step()
    times = alternate({name: one.step for name, one in both.items()}, rounds)
    for one in both.values():
        one.pipe.close()
    return times


def apart(found: State, wanted: State) -> float:
    """Return the largest difference, relative to the largest value."""
    return max(float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in found)


def measure(options: argparse.Namespace) -> Figures:
    """Compare every mesh with plain PyTorch."""
    torch.set_num_threads(1)
    steps = 2 if options.quick else STEPS
    expected = alone(steps)
    yield f"{'':30}{'loss':>9}{'gradient':>10}{'weight':>9}{'bytes a rank':>14}{'formula':>12}{'exchange':>10}"
    rows: dict[str, dict[str, Any]] = {}
    with LocalProcesses(8) as pool:
        for mesh in MESHES[:1] if options.quick else MESHES:
            told = pool.run(mesh.ranks, on_mesh, mesh, steps, options.rounds, timeout=1200)
            row = rows[str(mesh)] = {
                "loss": max(
                    abs(a / b - 1)
                    for one in told
                    for a, b in zip(one["losses"], expected["losses"], strict=True)
                ),
                "gradient": max(apart(one["gradients"], expected["gradients"]) for one in told),
                "weight": max(apart(one["weights"], expected["weights"]) for one in told),
                "bytes": max(one["bytes"] for one in told),
                "formula": max(formula(one["parameters"], mesh) for one in told),
                "exchange": max(one["exchange"] for one in told),
            }
            yield (
                f"{mesh!s:30}{row['loss']:9.1e}{row['gradient']:10.1e}{row['weight']:9.1e}{row['bytes']:14,}"
                f"{row['formula']:12,.0f}{row['exchange']:10.1%}"
            )
        times = pool.run(4, schedules, MESHES[0], options.rounds, timeout=1200)[0]
    over = ratio(times["zb-h1"], times["1f1b"])
    yield f"zb-h1 over 1f1b, {MESHES[0]}: {over:.2f}; a step of 1f1b {statistics.median(times['1f1b']) * 1e3:.0f} ms"
    yield f"{steps} steps, {options.rounds} rounds"
    return {"meshes": rows, "zb-h1 over 1f1b": over, "steps": steps, "rounds": options.rounds}


def formula(parameters: dict[str, tuple[int, bool]], mesh: MeshShape) -> float:
    """Return the bytes of a rank without ZeRO: 16 a parameter, of which ep ranks share those of experts."""
    return sum(16 * count / (mesh.ep if expert else 1) for count, expert in parameters.values())


if __name__ == "__main__":
    main(measure, __doc__, rounds=15)
