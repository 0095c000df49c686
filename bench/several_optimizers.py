"""Muon for the matrices of blocks and AdamW for the rest: equality with two torch optimizers, bytes, and time.

A small decoder takes steps on the same global batches, in plain PyTorch on one process and on each mesh; with replicas, ZeRO
is on, and every matrix has an owner; with tensor parallelism every process of a matrix updates all of it. The largest
difference of any weight at the end is from plain PyTorch, with the microbatches added in their order and in the mesh's (each
replica's own first). The first row is the difference of these two: Muon's products are in bf16, so another last bit of a
gradient shows there. The time is that of a step and an update over those of AdamW alone, in alternating steps of the same
processes.

    python -m bench.several_optimizers [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.compare import Figures, alternate, main, ratio
from penstock.parallel.dtensor import full_tensor
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.optim import is_of_blocks
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

CONFIG = ModelConfig(vocabulary=512, width=128, layers=4, heads=4, kv_heads=2, hidden=352)
MESHES = (MeshShape(2, 1, 1), MeshShape(2, 2, 1), MeshShape(2, 1, 2))
MICROBATCHES, ROWS, TOKENS, STEPS = 8, 2, 64, 10
MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 1e-3, "weight_decay": 0.01}
GROUPS = [{"match": is_of_blocks, "optimizer": torch.optim.Muon, **MUON}]

State = dict[str, Tensor]


def batch(step: int) -> Tensor:
    """Return the tokens of a step's global batch."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(CONFIG.vocabulary, (MICROBATCHES * ROWS, TOKENS), generator=generator)


@cache
def alone(replicas: int, steps: int) -> State:
    """Train in plain PyTorch on one process, with gradients summed as so many replicas do."""
    with Pipeline(layers(CONFIG), next_token_loss, microbatches=1, ranks=1) as pipe:
        net, named = pipe.stages[0].module, dict(pipe.named_parameters())
        matrices = [p for name, p in named.items() if is_of_blocks(name, p)]
        rest = [p for name, p in named.items() if not is_of_blocks(name, p)]
        optimizers = (torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **ADAMW))
        for step in range(steps):
            sums: State = {}
            for part in batch(step).chunk(replicas):
                for rows in part.split(ROWS):
                    (next_token_loss(net(rows), rows) / MICROBATCHES).backward()  # torch does not annotate it
                for name, p in named.items():
                    assert p.grad is not None, "every parameter is used"
                    sums[name] = sums[name] + p.grad if name in sums else p.grad
                    p.grad = None
            for name, p in named.items():
                p.grad = sums[name]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in named.items()}


class Contestant:
    """A pipeline of one process, with both optimizers or with AdamW alone."""

    def __init__(self, mesh: MeshShape, *, several: bool, zero: bool) -> None:
        self.pipe = Pipeline(
            layers(CONFIG), next_token_loss, microbatches=MICROBATCHES // mesh.dp, mesh=mesh, timeout=300
        )
        self.optimizer = PipelineOptimizer(
            self.pipe, torch.optim.AdamW, groups=GROUPS if several else None, zero=zero, **ADAMW
        )

    def step(self) -> float:
        """Return the seconds of a step and an update."""
        tokens = batch(self.pipe.steps)
        begin = perf_counter()
        self.pipe.step(tokens, tokens)
        self.optimizer.step()
        return perf_counter() - begin


def on_mesh(rank: int, mesh: MeshShape, steps: int, rounds: int) -> dict[str, Any]:
    """Return the weights after some steps, the bytes of state, and the times of both."""
    torch.set_num_threads(1)
    ours, undivided, adamw = (
        Contestant(mesh, several=several, zero=zero)
        for several, zero in ((True, mesh.dp > 1), (True, False), (False, mesh.dp > 1))
    )
    for _ in range(steps):
        ours.step()
    undivided.step()
    found = {
        "weights": {name: full_tensor(p.detach()).clone() for name, p in ours.pipe.named_parameters()},
        "bytes": ours.optimizer.state_bytes(),
        "undivided": undivided.optimizer.state_bytes(),
        "times": alternate({"ours": ours.step, "adamw": adamw.step}, rounds),
    }
    for one in (ours, undivided, adamw):
        one.pipe.close()
    return found


def worst(found: State, wanted: State) -> float:
    return max(float((value - wanted[name]).abs().max()) for name, value in found.items())


def measure(options: argparse.Namespace) -> Figures:
    """Compare every mesh with plain PyTorch, and its step with AdamW's."""
    torch.set_num_threads(1)
    steps = 3 if options.quick else STEPS
    yield f"{'':24}{'weights':>10}{'own order':>11}{'bytes a rank':>14}{'undivided':>12}{'over AdamW':>12}"
    orders = worst(alone(2, steps), alone(1, steps))
    yield f"{'plain, halves added':24}{orders:10.1e}"
    rows: dict[str, dict[str, Any]] = {}
    with LocalProcesses(4) as pool:
        for mesh in MESHES:
            told = pool.run(mesh.ranks, on_mesh, mesh, steps, options.rounds, timeout=1200)
            row = rows[str(mesh)] = {
                "weights": max(worst(one["weights"], alone(1, steps)) for one in told),
                "own order": max(worst(one["weights"], alone(mesh.dp, steps)) for one in told),
                "bytes": max(one["bytes"] for one in told),
                "undivided": max(one["undivided"] for one in told),
                "over AdamW": ratio(told[0]["times"]["ours"], told[0]["times"]["adamw"]),
            }
            yield (
                f"{mesh!s:24}{row['weights']:10.1e}{row['own order']:11.1e}{row['bytes']:14,}{row['undivided']:12,}"
                f"{row['over AdamW']:12.2f}"
            )
    yield f"{steps} steps, {options.rounds} rounds"
    return {"meshes": rows, "orders": orders, "steps": steps, "rounds": options.rounds}


if __name__ == "__main__":
    main(measure, __doc__, rounds=15)
