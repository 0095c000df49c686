"""Pipelines side by side, and matrices cut over processes: the gradients of one process on the global batch."""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.base.errors import ConfigError, NonFiniteError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import FAMILIES
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss
from tests.support import plain
from tests.support.groups import outcome, run_cases
from tests.support.lanes import exhaustive, slow

CONFIG = ModelConfig(vocabulary=32, width=16, layers=4, heads=4, kv_heads=2, hidden=32)
M, ROWS, SEQUENCE, STEPS = 4, 1, 8, 2


def tokens(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(0, 32, (microbatches * ROWS, SEQUENCE + 1), generator=generator)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def trained(
    rank: int, mesh: MeshShape | None, name: str, microbatches: int, steps: int = STEPS, parallel: Any = None
):
    """Losses, gradient norms, and at the end this process's weights, put together where they are cut."""
    losses, norms = [], []
    ranks = None if mesh is not None else 1
    with Pipeline(
        layers(CONFIG), next_token_loss, microbatches=microbatches, schedule=name, mesh=mesh, ranks=ranks,
        timeout=120,
        parallel=parallel or ParallelOptions(),
    ) as pipe:  # fmt: skip
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        replicas = 1 if mesh is None else mesh.dp
        for step in range(steps):
            result = pipe.step(*tokens(step, microbatches * replicas))
            losses.append(result.losses)
            norms.append(pipe.clip_grad_norm_(1.0))
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses), torch.stack(norms), pipe.state_dict()


@cache
def alone(microbatches: int, steps: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return trained(0, None, "1f1b", microbatches, steps)


def check(told: list, mesh: MeshShape, microbatches: int, steps: int = STEPS) -> None:
    want_losses, want_norms, want = alone(microbatches * mesh.dp, steps)
    names = set()
    for rank, (losses, norms, state) in enumerate(told):
        torch.testing.assert_close(losses, want_losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norms, want_norms, rtol=1e-4, atol=1e-5)
        names |= state.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, want[key], rtol=1e-3, atol=1e-5)
        # Replicas, and processes with parts of one matrix, have the very same bits.
        twin = told[mesh.rank(pp=mesh.coordinate(rank, "pp"))]
        assert all(torch.equal(value, twin[2][key]) for key, value in state.items())
        assert torch.equal(losses, told[0][0])
        assert torch.equal(norms, told[0][1])
    assert names == want.keys()


MICROBATCHES = {name: 8 if name in ("chimera", "dualpipe", "dualpipe-v") else M for name in sorted(FAMILIES)}


# Several stages a rank in order, split backwards, and copies of stages.
KINDS = ["interleaved-1f1b", "zb-v", "dualpipe"]
REST = [name for name in MICROBATCHES if name not in KINDS]
DP, TP = MeshShape(2, 2, 1), MeshShape(2, 1, 2)


@pytest.mark.parametrize(
    ("mesh", "names"), [*slow((DP, KINDS)), *exhaustive((DP, REST), (TP, KINDS + REST))], ids=["a", "b", "c"]
)
def test_every_schedule_beside_data_or_tensor_parallelism(
    processes: LocalProcesses, mesh: MeshShape, names: list[str]
):
    cases = [(mesh, name, MICROBATCHES[name]) for name in names]
    for (_, _, microbatches), told in zip(cases, run_cases(processes, 4, trained, cases), strict=True):
        check(told, mesh, microbatches)


SMALL, BY_SEQUENCE = ParallelOptions(bucket_bytes=1 << 10), ParallelOptions(sequence_parallel=True)


@pytest.mark.parametrize(
    ("mesh", "schedule", "parallel"),
    [
        (MeshShape(1, 2, 1), "gpipe", None),
        (MeshShape(1, 2, 1), "zb-h1", SMALL),  # reduced within the last backward
        *slow((MeshShape(1, 1, 2), "gpipe", None), (MeshShape(2, 1, 2), "zb-h1", BY_SEQUENCE)),
        *slow((MeshShape(2, 2, 1), "zb-h1", SMALL)),
    ],
)
def test_replicas_and_cut_matrices_train_as_one_process(processes: LocalProcesses, mesh, schedule, parallel):
    check(processes.run(mesh.ranks, trained, mesh, schedule, M, 3, parallel), mesh, M, 3)


def uneven(rank: int) -> tuple:
    mesh = MeshShape(1, 2, 1)
    x, y = plain.batch(0, 7)
    net = plain.model(2)
    with Pipeline(net, nn.functional.mse_loss, microbatches=2, mesh=mesh, timeout=300) as pipe:
        pipe.reduce_gradients = False
        pipe.step(x, y)
        before = {n: p.grad.clone() for n, p in net.named_parameters()}
        pipe.reduce_gradients = True
        result = pipe.step(x, y, outputs=True)
        return result.loss, before, {n: p.grad for n, p in net.named_parameters()}, len(result.outputs)


def test_an_uneven_global_batch_and_gradients_that_are_reduced_a_step_later(processes: LocalProcesses):
    first, second = processes.run(2, uneven)
    net = plain.model(2)
    x, y = plain.batch(0, 7)
    loss = nn.functional.mse_loss(net(x), y)
    (2 * loss).backward()
    for name, parameter in net.named_parameters():
        assert not torch.equal(first[1][name], second[1][name])
        assert torch.equal(first[2][name], second[2][name])
        torch.testing.assert_close(first[2][name], parameter.grad)
    torch.testing.assert_close(first[0], loss.detach())
    assert torch.equal(first[0], second[0])
    assert first[3] == second[3] == 2


class Tired(nn.Module):
    """Fails, or yields NaN, when it sees a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(plain.WIDTH, plain.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if (x == 7.0).any():
            raise ValueError("tired")
        return self.inner(x * torch.where((x == 9.0).any(), float("nan"), 1.0))


def fails_on_one(rank: int, mark: float) -> tuple[str, str]:
    torch.manual_seed(0)
    net = nn.Sequential(Tired(), nn.Linear(plain.WIDTH, plain.WIDTH))
    mesh = MeshShape(1, 2, 1)
    x, y = plain.batch(0, 8)
    with Pipeline(net, nn.functional.mse_loss, microbatches=2, mesh=mesh, timeout=300) as pipe:
        pipe.step(x, y)
        marked = x.clone()
        marked[5, 0] = mark  # in the second replica's first microbatch
        told = outcome(pipe.step, marked, y)
        for parameter in pipe.parameters():
            parameter.grad = None
        return told, str(pipe.step(x, y).loss)


def test_when_one_replica_fails_or_has_nan_every_process_stops_and_the_next_step_is_sound(
    processes: LocalProcesses,
):
    failing, nan = run_cases(processes, 2, fails_on_one, [(7.0,), (9.0,)])
    assert all("tired" in text for text, _ in failing)
    assert {text.split(":")[0] for text, _ in failing} == {"StageError", "PeerError"}
    assert {text for text, _ in nan} == {nan[0][0]}
    assert nan[0][0].startswith(f"{NonFiniteError.__name__}: step 2: the loss of microbatch 2 is NaN")
    assert len({loss for _, loss in (*failing, *nan)}) == 1


def dropout(rank: int, mesh: MeshShape | None, microbatches: int):
    net = nn.Sequential(*plain.model(1), nn.Dropout(0.5), *plain.model(1), nn.Dropout(0.5))
    with Pipeline(net, nn.functional.mse_loss, microbatches=microbatches, mesh=mesh, timeout=300) as pipe:
        return pipe.step(*plain.batch(0, 8)).losses


def test_dropout_is_that_of_the_global_batch(processes: LocalProcesses):
    for losses in processes.run(2, dropout, MeshShape(1, 2, 1), 2):
        assert torch.equal(losses, dropout(0, None, 4))


def refused(rank: int) -> list[str]:
    found = []
    for options in (
        {"mesh": MeshShape(2, 3, 1)},
        {"mesh": MeshShape(2, 1, 1), "ranks": 1},
        {"mesh": MeshShape(1, 1, 2), "parallel": ParallelOptions(family="penstok")},
    ):
        given = {"microbatches": 2, "timeout": 300, **options}
        found.append(outcome(Pipeline, layers(CONFIG), next_token_loss, **given))
    return found


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_is_refused_on_every_process(processes: LocalProcesses):
    for told in processes.run(2, refused):
        assert "a mesh of pp 2 x dp 3 x tp 1 has 6 ranks, but the launch has 2 processes" in told[0]
        assert "the mesh has 2 pipeline ranks, but ranks=1" in told[1]
        assert "'penstok' (did you mean 'penstock'?)" in told[2]


@pytest.mark.parametrize("mesh", [MeshShape(2, 1, 2), MeshShape(2, 2, 1)], ids=["tp2", "dp2"])
def test_replicas_and_shards_in_one_process_are_refused_with_the_command_that_starts_several(mesh):
    with pytest.raises(
        ConfigError, match=r"needs 4 processes, .* this is one process; .*torchrun --nproc-per-node 4 SCRIPT"
    ):
        penstock.Pipeline(plain.model(2), nn.functional.mse_loss, microbatches=2, mesh=mesh)


def accumulates(rank: int) -> None:
    net, other = plain.model(4), plain.model(4)
    x, y = plain.batch(0, 16)
    with Pipeline(net, nn.functional.mse_loss, microbatches=4, mesh=MeshShape(1, 2, 1), timeout=300) as pipe:
        for zero in (True, False):
            for reduces in (False, True, True):
                pipe.reduce_gradients = reduces
                result = pipe.step(x, y, outputs=True)
            for _ in range(3):
                nn.functional.mse_loss(other(x), y).backward()
            plain.require_equal_gradients(net, other, exactly=False)
            for parameter in (*net.parameters(), *other.parameters()):
                if zero:
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
        assert (len(result.outputs), len(result.losses)) == (4, 8)
        evaluated = pipe.evaluate(x, y)
        torch.testing.assert_close(evaluated.loss, result.loss)


def test_gradients_accumulate_whether_they_are_zeroed_or_dropped_and_reduced_or_not(
    processes: LocalProcesses,
):
    processes.run(2, accumulates)


def bucket_order(rank: int) -> tuple[list[str], list[str]]:
    """The parameters in the buckets' order, in the second step and in the third."""
    net = nn.ModuleDict({"late": plain.model(1), "early": plain.model(1)})
    mesh, small = MeshShape(1, 2, 1), ParallelOptions(bucket_bytes=1)
    found = []
    options = {"microbatches": 4, "mesh": mesh, "parallel": small, "timeout": 300}
    with Pipeline([("all", Backwards(net))], nn.functional.mse_loss, **options) as pipe:
        for n in range(3):
            pipe.step(*plain.batch(n, 16))
            reduction = pipe._local.replica_reduction
            buckets = reduction.buckets
            found.append([buckets.entries[m].name for b in buckets.buckets for m in b.plan.members])
    assert found[0] == found[1]
    return found[1], found[2]


class Backwards(nn.Module):
    """Runs its parts in another order than they are registered."""

    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["late"](self.parts["early"](x))


def test_buckets_are_made_again_in_the_order_of_the_second_backward(processes: LocalProcesses):
    for before, after in processes.run(2, bucket_order):
        assert [name.split(".")[2] for name in before] == ["early"] * 4 + ["late"] * 4
        assert [name.split(".")[2] for name in after] == ["late"] * 4 + ["early"] * 4


FOLLOWING = (MeshShape(2, 2, 1), MeshShape(1, 2, 2))


def one_mesh_after_another(rank: int) -> list:
    """Communicators of the first are closed when those of the second, over other processes, are opened."""
    return [trained(rank, mesh, "1f1b", M, steps=1)[0] for mesh in FOLLOWING]


@pytest.mark.slow
def test_pipelines_on_several_meshes_follow_one_another_in_the_same_processes():
    # New processes: DTensor keeps what it knows of a mesh longer than a worker's process group lives.
    with LocalProcesses(4) as fresh:
        told = fresh.run(4, one_mesh_after_another)
    want = alone(M * 2, 1)[0]
    for losses in told:
        for found in losses:
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def leaves_nothing(rank: int) -> tuple[list[bool], int]:
    net = plain.model(2)
    mesh = MeshShape(1, 2, 1)
    with Pipeline(net, nn.functional.mse_loss, microbatches=2, mesh=mesh, timeout=300) as pipe:
        pipe.step(*plain.batch(0, 8))
    hooks = [bool(p._post_accumulate_grad_hooks) for p in net.parameters()]
    del pipe
    gc.collect()
    threads = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
    return hooks, threads.count("gloo_tcp_loop\n")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux tells them")
def test_a_closed_pipeline_leaves_no_hooks_and_no_communicators(processes: LocalProcesses):
    first, second = processes.run(2, leaves_nothing), processes.run(2, leaves_nothing)
    for (hooks, before), (_, after) in zip(first, second, strict=True):
        assert not any(hooks)
        assert after <= before
