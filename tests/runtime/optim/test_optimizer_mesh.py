"""One optimizer over pipelines side by side and matrices cut over processes: as over the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.parallel.dtensor import is_sharded, local
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

CONFIG = ModelConfig(vocabulary=32, width=16, layers=4, heads=4, kv_heads=2, hidden=32)
GROUPS = [{"match": r"norm|embedding", "weight_decay": 0.0, "lr": 0.02}]
M, STEPS = 4, 6


def tokens(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(0, 32, (M, 9), generator=generator)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def pipe_on(mesh: MeshShape | None) -> Pipeline:
    return Pipeline(
        layers(CONFIG), next_token_loss, microbatches=M // (mesh.dp if mesh else 1), schedule="1f1b", mesh=mesh,
        ranks=None if mesh else 1, timeout=120,
    )  # fmt: skip


def adamw(pipe: Pipeline, **options: Any) -> PipelineOptimizer:
    return PipelineOptimizer(
        pipe, torch.optim.AdamW, groups=GROUPS, lr=0.01, weight_decay=0.1, clip=0.5, **options
    )


def trained(rank: int, mesh: MeshShape | None, fused: bool, accumulate: int) -> tuple[list, dict, dict]:
    """Norms, and at the end weights and optimizer state, put together where they are cut."""
    with pipe_on(mesh) as pipe:
        optimizer = adamw(pipe, fused=fused, accumulate=accumulate)
        norms = []
        for step in range(STEPS):
            pipe.step(*tokens(step))
            update = optimizer.step()
            norms += [update.grad_norm] if update.applied else []
        # A state that was put together fits where it came from.
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        pipe.step(*tokens(STEPS))
        if accumulate == 1:
            norms.append(optimizer.step().grad_norm)
        return norms, pipe.state_dict(), state


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshShape(2, 1, 2), MeshShape(1, 2, 2)], ids=["pp2 tp2", "dp2 tp2"])
@pytest.mark.parametrize(("fused", "accumulate"), [(True, 1), pytest.param(False, 3, marks=pytest.mark.slow)])
def test_adamw_with_groups_is_that_of_the_unsplit_model(
    processes: LocalProcesses, mesh: MeshShape, fused: bool, accumulate: int
):
    want_norms, want, want_state = trained(0, None, fused, accumulate)
    told = processes.run(4, trained, mesh, fused, accumulate)
    joined: dict[str, Any] = {}
    names = set()
    for rank, (norms, state, optimizer) in enumerate(told):
        torch.testing.assert_close(norms, want_norms, rtol=1e-4, atol=1e-5)
        names |= state.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, want[name], rtol=1e-3, atol=1e-4)
        twin = told[mesh.rank(pp=mesh.coordinate(rank, "pp"))]
        assert all(torch.equal(value, twin[1][name]) for name, value in state.items())
        joined.update(optimizer["state"])
        assert {n: (p["group"], p["shape"]) for n, p in optimizer["parameters"].items()} == {
            n: (p["group"], p["shape"])
            for n, p in want_state["parameters"].items()
            if n in optimizer["parameters"]
        }
    assert names == want.keys()
    assert joined.keys() == want_state["state"].keys()
    for name, entries in want_state["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(joined[name][key], value, rtol=1e-3, atol=1e-5)


def in_bf16(rank: int, mesh: MeshShape | None) -> tuple[dict, dict]:
    torch.manual_seed(0)
    parts = [(layer.name, layer.build().bfloat16()) for layer in layers(CONFIG)]
    microbatches = M // (mesh.dp if mesh else 1)
    with Pipeline(
        parts, next_token_loss, microbatches=microbatches, mesh=mesh, ranks=None if mesh else 1, timeout=120
    ) as pipe:
        optimizer = adamw(pipe, main_weights=True)
        for step in range(STEPS):
            pipe.step(*tokens(step))
            optimizer.step()
        mains = {n: main.clone() for n, main in optimizer.state_dict()["main_weights"].items()}
        optimizer.load_state_dict(optimizer.state_dict())
        # What someone loads into the model is what training goes on from.
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        pipe.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
        pipe.step(*tokens(0))
        optimizer.step()
        assert all(float(value.abs().max()) < 0.1 for value in pipe.state_dict().values())
        return before, mains


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshShape(1, 1, 2), MeshShape(1, 2, 1)], ids=["tp2", "dp2"])
def test_main_weights_of_replicas_and_of_cut_parameters_are_rounded_into_them(
    processes: LocalProcesses, mesh: MeshShape
):
    _, want = in_bf16(0, None)
    for state, mains in processes.run(2, in_bf16, mesh):
        assert mains.keys() == want.keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(value, mains[name].bfloat16())
            # Sums over processes are rounded to bf16 in another order; AdamW moves by 0.02 a step at most.
            assert float((mains[name] - want[name]).norm() / want[name].norm()) < 0.1


def accumulating(rank: int, always: bool) -> tuple[list[bool], dict, Tensor]:
    mesh = MeshShape(2, 2, 1)
    with pipe_on(mesh) as pipe:
        optimizer = adamw(pipe, accumulate=3)
        told = []
        for step in range(STEPS):
            if always:
                pipe.reduce_gradients = True
            told.append(pipe.reduce_gradients)
            pipe.step(*tokens(step))
            gradient = next(p.grad.clone() for p in pipe.parameters())
            optimizer.step()
            if step == 1:
                waiting = gradient
        return told, pipe.state_dict(), waiting


def test_replicas_add_up_their_gradients_once_an_update(processes: LocalProcesses):
    once, always = (processes.run(4, accumulating, way) for way in (False, True))
    mesh = MeshShape(2, 2, 1)
    first, twin = mesh.rank(dp=0), mesh.rank(dp=1)
    assert all(told == [False, False, True] * 2 for told, _, _ in once)
    assert not torch.equal(once[first][2], once[twin][2])
    assert torch.equal(always[first][2], always[twin][2])
    for rank in range(4):
        for name, value in once[rank][1].items():
            # The same sums in another order.
            torch.testing.assert_close(value, always[rank][1][name], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, once[twin][1][name]) for name, value in once[first][1].items())


def overflowing(rank: int) -> list[tuple[bool, float]]:
    """An inf in the part of a matrix that only one process holds."""
    with pipe_on(MeshShape(2, 1, 2)) as pipe:
        optimizer = PipelineOptimizer(
            pipe, torch.optim.AdamW, lr=0.01, clip=1.0, scaler=GradScaler(init_scale=8.0)
        )
        told = []
        for step in range(3):
            pipe.step(*tokens(step))
            if step == 1 and rank == 3:
                next(local(p.grad) for p in pipe.parameters() if is_sharded(p)).fill_(torch.inf)
            told.append((optimizer.step().applied, optimizer.scaler.scale))
        return told


@pytest.mark.slow
def test_an_inf_in_one_process_s_part_skips_the_update_in_all(processes: LocalProcesses):
    assert processes.run(4, overflowing) == [[(True, 8.0), (False, 4.0), (True, 4.0)]] * 4


def of_whole_matrices(rank: int) -> str:
    with pipe_on(MeshShape(1, 1, 2)) as pipe:
        try:
            PipelineOptimizer(pipe, torch.optim.Adafactor, lr=0.01)
        except ConfigError as error:
            return str(error)
    return ""


def test_an_optimizer_of_whole_matrices_is_refused_for_parts_of_them(processes: LocalProcesses):
    for text in processes.run(2, of_whole_matrices):
        assert "Adafactor does not update every element by itself" in text
        assert "or tp = 1" in text


def other_arguments(rank: int, given: list[dict[str, Any]]) -> list[str]:
    told = []
    for by_rank in given:
        with pipe_on(MeshShape(pp=2)) as pipe, pytest.raises(ConfigError) as error:
            PipelineOptimizer(pipe, **{"optimizer": torch.optim.AdamW, "lr": 0.01, **by_rank[rank]})
        told.append(str(error.value))
    return told


def test_processes_that_give_other_arguments_are_told(processes: LocalProcesses):
    own = [{"match": "proj", "optimizer": torch.optim.SGD, "lr": 0.1}]
    told = processes.run(
        2,
        other_arguments,
        [
            ({}, {"lr": 0.02}),
            ({"groups": own}, {"groups": [{**own[0], "lr": 0.3}]}),
            ({"optimizer": torch.optim.SGD}, {}),
            ({"clip": -1}, {}),
        ],
    )
    assert told[0] == told[1]
    assert "lr is 0.01 on rank 0" in told[0][0]
    assert "0.02 on rank 1" in told[0][0]
    assert "groups[0].lr is 0.1 on rank 0" in told[0][1]
    assert "optimizer is SGD on rank 0" in told[0][2]
    assert "AdamW on rank 1" in told[0][2]
    assert "clip is -1 on rank 0" in told[0][3]
