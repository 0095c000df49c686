"""Biases of experts move once an optimizer step, by the tokens of all its microbatches, copies and replicas."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Checkpoints, MeshShape, ParallelOptions, Pipeline, PipelineOptimizer
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model.experts import Router
from penstock.train.model.llama import layers, next_token_loss
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive

CONFIG = ModelConfig(
    vocabulary=32, width=16, layers=4, heads=4, kv_heads=2, experts=4, expert_hidden=24, router="sigmoid",
    bias_update_rate=0.05,
)  # fmt: skip
MICROBATCHES, STEPS = 4, 2
Biases = dict[str, list[int]]


def batch(step: int) -> Tensor:
    return torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(step))


@cache
def by_hand() -> tuple[Biases, dict[str, Tensor]]:
    """Return the biases and weights of plain PyTorch, with tokens counted by hooks."""
    torch.manual_seed(0)
    with Pipeline(layers(CONFIG), next_token_loss, microbatches=1, ranks=1) as pipe:
        net, named = pipe.stages[0].module, dict(pipe.named_parameters())
        routers = {
            f"{name}.{inner}": module
            for name, layer in net.named_layers()
            for inner, module in layer.named_modules()
            if isinstance(module, Router)
        }
        counts = {name: torch.zeros(4) for name in routers}

        def count(name: str, index: Tensor) -> None:
            counts[name] += torch.bincount(index.flatten(), minlength=4)

        for name, router in routers.items():
            router.register_forward_hook(lambda _, args, out, name=name: count(name, out[1]))
        optimizer = torch.optim.SGD(named.values(), lr=0.1)
        for step in range(STEPS):
            for rows in batch(step).chunk(MICROBATCHES):
                (next_token_loss(net(rows), rows) / MICROBATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, router in routers.items():
                assert counts[name].sum() == 8 * 6 * 2
                router.bias += (counts[name].mean() - counts[name]).sign().long()
                counts[name].zero_()
        return (
            {name: router.bias.tolist() for name, router in routers.items()},
            {name: p.detach().clone() for name, p in named.items()},
        )


def biases(pipe: Pipeline) -> Biases:
    return {
        f"{name}.{inner}": module.bias.tolist()
        for stage in pipe.stage_modules()
        for name, layer in stage.named_layers()
        for inner, module in layer.named_modules()
        if isinstance(module, Router)
    }


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("zb-h1", "full"), ("dualpipe", "none"), *exhaustive(("1f1b", "none"), ("zb-v", "none"))],
)
def test_in_every_schedule_the_biases_are_those_of_plain_pytorch(schedule: str, recompute: Any):
    expected, weights = by_hand()
    assert any(value for of_router in expected.values() for value in of_router)
    torch.manual_seed(0)
    options = {"microbatches": MICROBATCHES, "ranks": 2, "schedule": schedule, "recompute": recompute}
    with Pipeline(layers(CONFIG), next_token_loss, **options) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        for step in range(STEPS):
            pipe.step(batch(step), batch(step))
            pipe.evaluate(batch(100), batch(100))
            optimizer.step()
        assert biases(pipe) == expected
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter, weights[name]) or schedule == "dualpipe", name


def test_steps_that_accumulate_count_together_and_dropped_ones_do_not():
    expected, _ = by_hand()
    torch.manual_seed(0)
    with Pipeline(layers(CONFIG), next_token_loss, microbatches=2, ranks=2) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, accumulate=2)
        pipe.step(batch(200), batch(200))
        optimizer.zero_grad()
        for step in range(STEPS):
            for rows in batch(step).chunk(2):
                pipe.step(rows, rows)
                optimizer.step()
        assert biases(pipe) == expected


def test_experts_are_chosen_with_the_bias_and_weighed_without_it():
    router = Router(replace(CONFIG, experts_per_token=1))
    with torch.no_grad():
        router.weight.normal_(0, 0.01)
    x = torch.randn(5, 16)
    _, index, weights = router(x)
    router.bias += 100 * torch.eye(4, dtype=torch.int64)[3]
    _, biased, others = router(x)
    assert biased.flatten().tolist() == [3] * 5
    assert torch.equal(weights, others)  # one expert's weight is its own score over itself
    assert router.load.tolist() == torch.bincount(torch.cat([index, biased]).flatten(), minlength=4).tolist()


MESHES: list[dict[str, int]] = [{"dp": 2, "ep": 2}, {"dp": 2}, {"tp": 2}, {"pp": 2}]


def in_processes(rank: int, sizes: dict[str, int]) -> Biases:
    torch.manual_seed(0)
    with Pipeline(
        layers(CONFIG), next_token_loss, microbatches=MICROBATCHES // sizes.get("dp", 1), mesh=MeshShape(**sizes),
        parallel=ParallelOptions(check_replicas=1), timeout=120,
    ) as pipe:  # fmt: skip
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, zero=sizes.get("dp", 1) > 1)
        for step in range(STEPS):
            pipe.step(batch(step), batch(step))
            optimizer.step()
        return biases(pipe)


@pytest.mark.slow
def test_processes_move_the_biases_alike(processes: LocalProcesses):
    expected, _ = by_hand()
    for by_rank in run_cases(processes, 2, in_processes, [(sizes,) for sizes in MESHES]):
        found: Biases = {}
        for of_rank in by_rank:
            assert all(found.get(name, bias) == bias for name, bias in of_rank.items())
            found |= of_rank
        assert found == expected


def test_a_checkpoint_has_the_biases(tmp_path: Path):
    expected, _ = by_hand()
    for half in range(2):
        torch.manual_seed(0)
        with Pipeline(layers(CONFIG), next_token_loss, microbatches=MICROBATCHES, ranks=1 + half) as pipe:
            optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
            with Checkpoints(tmp_path, pipe, optimizer) as checkpoints:
                checkpoints.load_newest()
                for step in range(half * STEPS // 2, (half + 1) * STEPS // 2):
                    pipe.step(batch(step), batch(step))
                    optimizer.step()
                checkpoints.save()
                assert half == 0 or biases(pipe) == expected
