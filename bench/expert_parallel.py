"""Experts divided over processes: equality with one process, bytes, the exchange's share of a step, zero bubble over 1F1B.

A small built-in decoder with a mixture of experts in each block takes steps on the same global batches, in plain PyTorch on
one process and on each mesh. The largest differences are from plain PyTorch: of a loss and of a gradient of the first step
relative to the largest one, and of a weight after the last step. Bytes are those of weights, gradients and AdamW's state on
the fullest rank, beside the formula: 16 bytes a parameter in fp32, with the experts' divided by ep. The exchange is the
share of a step that the slowest process spends in the all-to-alls of tokens, waits for the others included. The experts of
one layer of Mixtral, forward and backward on two processes, are timed beside transformers' own division, with the same
collectives, module and weights.

    python -m bench.expert_parallel [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.compare import Figures, alternate, main, ratio
from penstock.parallel.dtensor import full_tensor, is_dtensor, local
from penstock.parallel.experts.layers import divide_experts
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
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
TOKENS_OF_LAYER, WIDTH, INNER = 1024, 256, 512  # on each of two processes
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
    seconds = exchange = 0.0
    for _ in range(rounds):
        seconds += ours.step()
        load = ours.pipe.gather_expert_load()
        assert load is not None, "experts are divided"
        exchange += load.exchange_seconds[rank]
    ours.pipe.close()
    return {**found, "exchange": exchange / seconds}


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


class Exchanges:
    """The collectives of two processes, as `divide_experts` takes them."""

    size = 2

    def prepare(self, calls: Sequence[str], width: int) -> None:
        self._calls, self._width = calls, width

    def meet(self, call: str, rows: Tensor) -> Tensor:
        given = rows.new_zeros(self.size, 1 + self._width)
        given[:, 0] = self._calls.index(call)
        given[:, 1 : 1 + rows.shape[1]] = rows
        return self.all_to_all(given, [1, 1], [1, 1])[:, 1 : 1 + rows.shape[1]]

    def all_to_all(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = values.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(out, values, received, sent)
        return out

    def count(self, name: str, tokens: Tensor) -> None:
        pass


def own_part(stack: Tensor) -> Tensor:
    """Return this process's experts of a stack, in the graph."""
    assert is_dtensor(stack), "it is divided"
    part: Tensor = stack.to_local()
    return part


def beside_transformers(rank: int, rounds: int) -> dict[str, list[float]]:
    """Return the times of a forward and a backward of one layer's experts, ours and transformers' ``AllToAllEP``."""
    from transformers import MixtralConfig
    from transformers.distributed.expert_parallel import AllToAllEP
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.set_num_threads(1)
    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=8, num_experts_per_tok=2
    )
    config._experts_implementation = "grouped_mm"
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    torch.manual_seed(0)
    ours, theirs = MixtralExperts(config), MixtralExperts(config)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(0, 0.05)
    theirs.num_experts = each = config.num_local_experts // 2
    for name, parameter in list(ours.named_parameters()):
        theirs.register_parameter(
            name, nn.Parameter(parameter.detach()[rank * each : (rank + 1) * each].clone())
        )
    dispatched = AllToAllEP(theirs, mesh["ep"], mesh["tp"])
    divide_experts([("experts", ours)], mesh["ep"], Exchanges(), None, own_part)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS_OF_LAYER, WIDTH, generator=generator, requires_grad=True)
    scores, index = torch.rand(TOKENS_OF_LAYER, 8, generator=generator).softmax(-1).topk(2)
    grads = []
    for call in (ours, dispatched):
        call(x, index, scores).sum().backward()  # torch does not annotate it
        grads.append(x.grad)
        x.grad = None
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            local(parameter.grad), theirs.get_parameter(name).grad, rtol=1e-4, atol=1e-4
        )

    def timed(call: Callable[..., Tensor]) -> Callable[[], float]:
        def run() -> float:
            dist.barrier()
            begin = perf_counter()
            call(x, index, scores).sum().backward()  # torch does not annotate it
            return perf_counter() - begin

        return run

    return alternate({"ours": timed(ours), "theirs": timed(dispatched)}, rounds)


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
        layer = pool.run(2, beside_transformers, options.rounds, timeout=1200)[0]
    over = ratio(times["zb-h1"], times["1f1b"])
    beside = ratio(layer["ours"], layer["theirs"])
    yield f"zb-h1 over 1f1b, {MESHES[0]}: {over:.2f}; a step of 1f1b {statistics.median(times['1f1b']) * 1e3:.0f} ms"
    yield (
        f"experts of a layer over transformers' AllToAllEP, ep 2: {beside:.2f}; "
        f"{', '.join(f'{name} {statistics.median(found) * 1e3:.0f} ms' for name, found in layer.items())}"
    )
    yield f"{steps} steps, {options.rounds} rounds"
    return {
        "meshes": rows,
        "zb-h1 over 1f1b": over,
        "over AllToAllEP": beside,
        "steps": steps,
        "rounds": options.rounds,
    }


def formula(parameters: dict[str, tuple[int, bool]], mesh: MeshShape) -> float:
    """Return the bytes of a rank without ZeRO: 16 a parameter, of which ep ranks share those of experts."""
    return sum(16 * count / (mesh.ep if expert else 1) for count, expert in parameters.values())


if __name__ == "__main__":
    main(measure, __doc__, rounds=15)
