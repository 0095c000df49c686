"""A store in processes: the bits of a plain run, checkpoints that continue anywhere, and one error on every rank."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.checkpoint.checkpoints import Checkpoints
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.layers import Layer
from tests.support import checkpoint_runs, plain, tied
from tests.support.full_disk import files_of_at_most
from tests.support.groups import outcome, run_cases
from tests.support.lanes import exhaustive, slow
from tests.support.states import assert_equal

STORES = {name: ParallelOptions(store=name, window=1) for name in ("host", "disk")}


def trained(rank: int, schedule: str, store: str, virtual_stages: int | None) -> tuple[list, dict, list]:
    settings = {"schedule": schedule, "virtual_stages": virtual_stages, "timeout": 120}
    with Pipeline(
        plain.model(8), nn.functional.mse_loss, microbatches=4, parallel=STORES[store], **settings
    ) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, clip=0.5)
        losses, gradients = [], []
        for n in range(5):
            losses.append(pipe.step(*plain.batch(n, 8)).losses)
            gradients = [p.grad is not None for p in pipe.parameters()]
            optimizer.step()
        return losses, copy.deepcopy(pipe.full_state_dict()), gradients


@pytest.mark.parametrize("ranks", [*slow(2), *exhaustive(4)])
def test_processes_have_the_bits_of_plain_pytorch(processes: LocalProcesses, ranks):
    schedules = (("1f1b", None), ("interleaved-1f1b", 8 // ranks), ("zb-v", None))
    cases = [(name, store, v) for store in STORES for name, v in schedules]
    expected, weights, _ = plain.train(8, 4, steps=5)
    for told in run_cases(processes, ranks, trained, cases):
        for losses, ours, gradients in told:
            assert all(map(torch.equal, losses, expected))
            assert_equal(dict(ours), weights)
            assert all(gradients)


def with_tied_ends(rank: int, store: str | None, schedule: str) -> tuple[list, dict]:
    options = ParallelOptions() if store is None else STORES[store]
    settings = {"microbatches": 4, "schedule": schedule, "timeout": 120}
    with Pipeline(tied.model(), tied.loss_fn, parallel=options, **settings) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, accumulate=2)
        losses = []
        for n in range(6):
            losses.append(pipe.step(*tied.batch(n)).losses)
            optimizer.step()
        return losses, copy.deepcopy(pipe.full_state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["1f1b", "chimera", "round-trip"]
)  # whose ranks share a weight, or all stages
def test_a_weight_that_two_ranks_have_is_trained_as_without_a_store(processes: LocalProcesses, schedule):
    cases = [(store, schedule) for store in (None, "host", "disk")]
    alone, *stored = run_cases(processes, 2, with_tied_ends, cases)
    for told in stored:
        for (losses, weights), (expected, others) in zip(told, alone, strict=True):
            assert all(map(torch.equal, losses, expected))
            assert_equal(dict(weights), dict(others))


def part_of_a_run(
    rank: int, folder: str, ranks: int | None, store: str | None, steps: int, saves: bool
) -> tuple[list[float], tuple]:
    options = ParallelOptions() if store is None else STORES[store]
    with checkpoint_runs.pipeline(ranks=ranks, parallel=options) as pipe:
        optimizer = checkpoint_runs.adamw(pipe)
        with Checkpoints(folder, pipe, optimizer) as checkpoints:
            checkpoints.load_newest()
            losses = checkpoint_runs.steps(pipe, optimizer, steps)
            if saves:
                checkpoints.save()
        return losses, checkpoint_runs.state_of(pipe, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("disk", None), (None, "disk"), ("host", "disk")])
def test_a_checkpoint_continues_at_another_layout_with_and_without_a_store(
    processes: LocalProcesses, tmp_path: Path, first, then
):
    whole, expected = part_of_a_run(0, str(tmp_path / "whole"), 1, None, 6, False)
    folder = str(tmp_path / "parts")
    begun = processes.run(2, part_of_a_run, folder, None, first, 3, True)
    assert begun[0][0] == whole[:3]
    losses, state = part_of_a_run(0, folder, 1, then, 3, False)
    assert losses == whole[3:]
    assert_equal(state[0], expected[0])
    assert_equal(state[1], expected[1])


def wide_layers() -> list[Layer]:
    def make(n: int) -> Layer:
        return Layer(f"layer {n}", lambda: nn.Linear(256, 256))

    return [make(n) for n in range(4)]


BYTES = 4 * 256 * 256


def outcomes(rank: int, narrow: bool) -> list[str]:
    """What each rank is told if one has no room for weights, for moments, or for gradients of another dtype."""

    def full(size: int) -> Any:
        return files_of_at_most(size) if rank == 1 else nullcontext()

    def build() -> Pipeline:
        given = (
            wide_layers() if not narrow else [(x.name, x.build().to(torch.bfloat16)) for x in wide_layers()]
        )
        settings = {"microbatches": 2, "timeout": 120, "mesh": MeshShape(pp=2)}
        return Pipeline(given, lambda a, b: (a - b).square().mean(), parallel=STORES["disk"], **settings)

    x = torch.ones(4, 256, dtype=torch.bfloat16 if narrow else torch.float32)
    told = []
    with full(BYTES // 4):
        told.append(outcome(build))
    with build() as pipe:
        with full(BYTES // 4):
            told.append(outcome(PipelineOptimizer, pipe, torch.optim.AdamW, lr=0.01, main_weights=narrow))
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, main_weights=narrow)
        before = copy.deepcopy(pipe.state_dict())
        with full(BYTES // 4):  # all files are there: a disk that gets full later does not matter
            pipe.step(x, x)
            optimizer.step()
        changed = [not torch.equal(before[name], value) for name, value in pipe.state_dict().items()]
        told.append(str(all(changed)))
    return told


@pytest.mark.slow
def test_a_full_disk_is_one_error_on_every_rank_before_the_first_step(processes: LocalProcesses):
    for told in run_cases(processes, 2, outcomes, [(False,), (True,)]):
        for weights, moments, trains in told:
            for text in (weights, moments):
                assert text.startswith("ConfigError: store='disk' cannot have a file of ")
                assert " bytes in " in text
                assert "File too large" in text
            assert trains == "True"
