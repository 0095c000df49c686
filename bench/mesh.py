"""Every schedule on every mesh beside one process, and ZeRO-1 beside the full optimizer: equality, and bytes.

A tiny decoder of 8 blocks takes steps on the same global batches, in plain PyTorch on one process and on each mesh. The
table has the largest differences: of any microbatch's loss in any step; of any gradient in the first step, relative to the
largest gradient; of any weight at the end. Only the order of summation may cause a difference. The first row shows its
size: one process again, with the microbatches in reverse. Replicas, and processes that share the same matrices, must have
the same bits at the end.

Then AdamW with its state divided among 1, 2 and 4 replicas is compared with the undivided one, with the bytes per rank.

    python -m bench.mesh [--steps N] [--mesh PPxDPxTP ...] [--schedule NAME ...] [--zero] [--quick] [--json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bench.compare import Figures, main
from penstock.base.errors import ConfigError
from penstock.parallel.dtensor import full_tensor
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

CONFIG = ModelConfig(vocabulary=32, width=16, layers=8, heads=4, kv_heads=2, hidden=32)
WIDER = ModelConfig(vocabulary=32, width=64, layers=8, heads=4, kv_heads=2, hidden=176)
MESHES = (
    MeshShape(1, 2, 1),
    MeshShape(1, 1, 2),
    MeshShape(2, 2, 1),
    MeshShape(2, 1, 2),
    MeshShape(2, 2, 2),
)
BY_NAME = {f"{mesh.pp}x{mesh.dp}x{mesh.tp}": mesh for mesh in MESHES}
ZERO_MESHES = (MeshShape(1, 1, 1), MeshShape(1, 2, 1), MeshShape(1, 4, 1), MeshShape(1, 2, 2))
SEQUENCE, STEPS = 8, 20
TWO_WAYS = ("chimera", "dualpipe", "dualpipe-v")
"""Schedules that want more microbatches than the others' 4 of a pipeline."""

State = dict[str, Tensor]


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(0, 32, (rows, SEQUENCE + 1), generator=generator)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02)


@cache
def alone(microbatches: int, steps: int, reverse: bool = False) -> tuple[Tensor, State, State]:
    """Train in plain PyTorch on one process: losses (steps, microbatches), the first gradients, the last weights."""
    losses: list[Tensor] = []
    gradients: State = {}
    with Pipeline(layers(CONFIG), next_token_loss, microbatches=1, ranks=1) as pipe:
        net, named = pipe.stages[0].module, dict(pipe.named_parameters())
        optimizer = sgd(named.values())
        for step in range(steps):
            parts = list(zip(*(part.chunk(microbatches) for part in batch(step, microbatches)), strict=True))
            row = {}
            for n in range(microbatches)[:: -1 if reverse else 1]:
                x, y = parts[n]
                loss = next_token_loss(net(x), y)
                (loss / microbatches).backward()  # torch does not annotate it
                row[n] = loss.detach()
            losses.append(torch.stack([row[n] for n in range(microbatches)]))
            gradients = gradients or {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses), gradients, {name: p.detach().clone() for name, p in named.items()}


def on_mesh(
    rank: int, mesh: MeshShape, name: str, microbatches: int, steps: int
) -> tuple[Tensor, State, State]:
    """Train as one process of a mesh: the same for its part of the model, gathered if it is sharded."""
    losses: list[Tensor] = []
    gradients: State = {}
    with Pipeline(
        layers(CONFIG), next_token_loss, microbatches=microbatches, schedule=name, mesh=mesh, timeout=300,
        parallel=ParallelOptions(bucket_bytes=4096),
    ) as pipe:  # fmt: skip
        optimizer = sgd(pipe.parameters())
        for step in range(steps):
            found = pipe.step(*batch(step, microbatches * mesh.dp)).losses
            assert found is not None, "there was a target"
            losses.append(found)
            gradients = gradients or {
                name: full_tensor(p.grad).clone() for name, p in pipe.named_parameters() if p.grad is not None
            }
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: full_tensor(p.detach()).clone() for name, p in pipe.named_parameters()}
        return torch.stack(losses), gradients, weights


def worst(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    return max(float((value - wanted[name]).abs().max()) for name, value in found.items())


def same_bits(parts: Sequence[Mapping[str, Tensor]], key: Callable[[int], int]) -> bool:
    """Return whether all processes with an equal key have equal tensors."""
    first: dict[int, Mapping[str, Tensor]] = {}
    for rank, part in enumerate(parts):
        twin = first.setdefault(key(rank), part)
        if part.keys() != twin.keys() or not all(torch.equal(v, twin[n]) for n, v in part.items()):
            return False
    return True


def deviation(pool: LocalProcesses, mesh: MeshShape, name: str, steps: int) -> dict[str, Any]:
    """Return the difference between a schedule on a mesh and one process.

    Raises:
        ConfigError: if the schedule has no form for so many pipeline ranks.
    """
    microbatches = 8 if name in TWO_WAYS else 4
    build_schedule(name, mesh.pp, microbatches, None)
    told = pool.run(mesh.ranks, on_mesh, mesh, name, microbatches, steps, timeout=1200)
    same = same_bits([one[2] for one in told], lambda rank: mesh.coordinate(rank, "pp"))
    losses_too = all(torch.equal(one[0], told[0][0]) for one in told)
    return {**compared(told, microbatches * mesh.dp, steps), "same bits": same and losses_too}


def compared(told: Sequence[tuple[Tensor, State, State]], microbatches: int, steps: int) -> dict[str, Any]:
    """Return the largest differences from one process."""
    losses, gradients, weights = alone(microbatches, steps)
    largest = max(float(g.abs().max()) for g in gradients.values())
    return {
        "losses": max(float((one[0] - losses).abs().max()) for one in told),
        "gradients": max(worst(one[1], gradients) for one in told) / largest,
        "weights": max(worst(one[2], weights) for one in told),
    }


def divided(rank: int, mesh: MeshShape, zero: bool, steps: int) -> tuple[State, int]:
    """Run AdamW over replicas without a pipeline; return weights, and bytes of state."""
    among = mesh if mesh.ranks > 1 else None
    with Pipeline(layers(WIDER), next_token_loss, microbatches=8 // mesh.dp, mesh=among, timeout=300) as pipe:
        optimizer = PipelineOptimizer(
            pipe, torch.optim.AdamW, lr=1e-3, clip=1.0, zero="overlap" if zero else False
        )
        for step in range(steps):
            pipe.step(*batch(step, 8))
            optimizer.step()
        return {name: value.clone() for name, value in pipe.state_dict().items()}, optimizer.state_bytes()


def zero_rows(pool: LocalProcesses, meshes: Sequence[MeshShape], steps: int) -> list[dict[str, Any]]:
    """Compare ZeRO-1 with the full optimizer, for some numbers of replicas and of processes per matrix."""
    rows: list[dict[str, Any]] = []
    for mesh in meshes:
        plain = pool.run(mesh.ranks, divided, mesh, False, steps, timeout=600)
        zero = pool.run(mesh.ranks, divided, mesh, True, steps, timeout=600)
        rows.append(
            {
                "mesh": str(mesh),
                "share": 1 / mesh.dp,
                "weights": max(worst(one[0], plain[0][0]) for one in zero),
                "same bits": same_bits([one[0] for one in zero], lambda rank: 0),
                "bytes": [one[1] for one in zero],
                "plain bytes": plain[0][1],
            }
        )
    return rows


def measure(options: argparse.Namespace) -> Figures:
    """Measure every schedule on every mesh, then the divided optimizer."""
    torch.set_num_threads(1)
    steps = options.steps or (2 if options.quick else STEPS)
    meshes = [BY_NAME[name] for name in options.mesh or (["2x2x1"] if options.quick else BY_NAME)]
    schedules = options.schedule or (["1f1b", "zb-v"] if options.quick else list(FAMILIES))
    result: dict[str, dict[str, Any]] = {}
    with LocalProcesses(max(4, *(mesh.ranks for mesh in meshes))) as pool:
        for mesh in () if options.zero else meshes:
            yield f"{mesh!s:24}{'losses':>10}{'gradients':>12}{'weights':>10}   replicas"
            rows = result[str(mesh)] = {}
            floor = compared([alone(4 * mesh.dp, steps, True)], 4 * mesh.dp, steps)
            figures = [f"{v:{w}.1e}" for v, w in zip(floor.values(), (10, 12, 10), strict=True)]
            yield "".join([f"{'one process, reversed':24}", *figures])
            for name in schedules:
                try:
                    row = rows[name] = deviation(pool, mesh, name, steps)
                except ConfigError as error:
                    yield f"{name:24}  {str(error).partition(';')[0]}"
                    continue
                same = "same bits" if row["same bits"] else "DIFFER"
                yield f"{name:24}{row['losses']:10.1e}{row['gradients']:12.1e}{row['weights']:10.1e}   {same}"
            yield ""
        zero = zero_rows(pool, ZERO_MESHES[:2] if options.quick and not options.zero else ZERO_MESHES, steps)
    yield f"{'AdamW':24}{'weights':>10}   replicas   {'bytes per rank':>14}{'without ZeRO':>14}{'ratio':>10}"
    for row in zero:
        same, most = "same bits" if row["same bits"] else "DIFFER", max(row["bytes"])
        yield (
            f"{row['mesh']:<24}{row['weights']:10.1e}   {same}  {most:14,}{row['plain bytes']:14,}"
            f"{most / row['plain bytes']:10.4f}"
        )
    yield f"{steps} steps"
    return {"meshes": result, "zero": zero, "steps": steps}


def add(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--steps", type=int, help=f"training steps (default {STEPS})")
    parser.add_argument("--mesh", nargs="+", choices=BY_NAME, metavar="PPxDPxTP", help="meshes (default all)")
    parser.add_argument("--schedule", nargs="+", choices=sorted(FAMILIES), help="schedules (default all)")
    parser.add_argument("--zero", action="store_true", help="only compare ZeRO-1 with the full optimizer")


if __name__ == "__main__":
    main(measure, __doc__, add=add)
