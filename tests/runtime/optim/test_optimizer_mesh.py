"""One optimizer over pipelines side by side and matrices cut over processes: as over the unsplit model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.base.errors import ConfigError
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.parallel.dtensor import full_tensor, is_sharded, local
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive, slow
from tests.support.states import assert_equal

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


PP, DP = MeshShape(2, 1, 2), MeshShape(1, 2, 2)


@pytest.mark.parametrize(
    ("mesh", "fused", "accumulate"),
    [*slow((PP, True, 1)), *exhaustive((DP, True, 1), (PP, False, 3), (DP, False, 3))],
)
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
        for name, found in optimizer["parameters"].items():
            wanted = want_state["parameters"][name]
            assert (found["group"], found["shape"]) == (wanted["group"], wanted["shape"])
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


@pytest.mark.parametrize(
    "mesh", [*slow(MeshShape(1, 1, 2)), *exhaustive(MeshShape(1, 2, 1))], ids=["tp2", "dp2"]
)
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
    with pipe_on(MeshShape(1, 2, 1)) as pipe:
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
    once, always = run_cases(processes, 2, accumulating, [(False,), (True,)])
    assert all(told == [False, False, True] * 2 for told, _, _ in once)
    assert not torch.equal(once[0][2], once[1][2])
    assert torch.equal(always[0][2], always[1][2])
    for rank in range(2):
        for name, value in once[rank][1].items():
            # The same sums in another order.
            torch.testing.assert_close(value, always[rank][1][name], rtol=1e-4, atol=1e-5)
            assert torch.equal(value, once[0][1][name])


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


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2


MUON = {"match": is_matrix, "optimizer": torch.optim.Muon, "lr": 0.02}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon": (torch.optim.AdamW, {"groups": [MUON], "lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


def torch_optimizers(kind: str, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    if kind == "Adafactor":
        return [torch.optim.Adafactor(parameters, lr=0.01)]
    rest = [p for p in parameters if p.dim() != 2]
    return [
        torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02),
        torch.optim.AdamW(rest, lr=0.01),
    ]


Case = tuple[str, torch.dtype]


def of_whole_matrices(
    rank: int, mesh: MeshShape | None, case: Case, steps: int, folder: Path, zero: Any = False
) -> dict[str, Tensor]:
    """Go on from what is saved, beside torch's optimizers over whole matrices; save, and return everything whole."""
    kind, dtype = case
    torch.manual_seed(0)
    parts = [(layer.name, layer.build().to(dtype)) for layer in layers(CONFIG)]
    count = M // (mesh.dp if mesh else 1)
    with Pipeline(
        parts, next_token_loss, microbatches=count, mesh=mesh, ranks=None if mesh else 1, timeout=120
    ) as pipe:
        make, options = KINDS[kind]
        optimizer = PipelineOptimizer(pipe, make, main_weights=dtype != torch.float32, zero=zero, **options)
        saved = Checkpoints(folder, pipe, optimizer)
        saved.load_newest()
        named = dict(pipe.named_parameters())
        twins = {name: nn.Parameter(full_tensor(p.detach()).float().clone()) for name, p in named.items()}
        optimizers = torch_optimizers(kind, list(twins.values()))
        for step in range(steps):
            pipe.step(*tokens(step))
            for name, p in named.items() if not zero else ():
                twins[name].grad = full_tensor(p.grad).float().clone()
            optimizer.step()
            for one in optimizers:
                one.step()
            for name, p in named.items() if not zero else ():
                assert torch.equal(full_tensor(p.detach()), twins[name].detach().to(dtype)), name
        pipe.wait()
        saved.save()
        saved.close()
        state = optimizer.state_dict()
        return {
            **{name: full_tensor(p.detach()) for name, p in named.items()},
            **{f"{name}: main": value for name, value in state["main_weights"].items()},
            **{f"{name}: {key}": v for name, found in state["state"].items() for key, v in found.items()},
        }


# The cases are tuples, so each stands in one of its own.
BF16, FP32, ADAFACTOR = (
    (("Muon", torch.bfloat16),),
    (("Muon", torch.float32),),
    (("Adafactor", torch.float32),),
)


def assert_loads(processes: LocalProcesses, parts: list[dict], case: Case, folder: Path, zero: Any) -> None:
    joined = {name: value for part in parts for name, value in part.items()}
    assert_equal(of_whole_matrices(0, None, case, 0, folder), joined)
    for part in processes.run(4, of_whole_matrices, MeshShape(1, 2, 2), case, 0, folder, zero):
        assert_equal(part, joined)


@pytest.mark.parametrize("case", [*slow(BF16), *exhaustive(ADAFACTOR, FP32)])
def test_cut_matrices_are_updated_whole_as_torch_does(processes: LocalProcesses, tmp_path: Path, case: Case):
    cut = processes.run(4, of_whole_matrices, MeshShape(2, 1, 2), case, 3, tmp_path)
    assert_loads(processes, cut, case, tmp_path, "overlap")


@pytest.mark.parametrize("case", [*slow(BF16), *exhaustive(FP32, ADAFACTOR)])
def test_owners_of_cut_matrices_take_the_same_steps(processes: LocalProcesses, tmp_path: Path, case: Case):
    cases = [(MeshShape(1, 2, 2), case, 3, tmp_path / str(zero), zero) for zero in (True, False)]
    divided, whole = run_cases(processes, 4, of_whole_matrices, cases)
    assert_equal(dict(enumerate(divided)), dict(enumerate(whole)))
    assert_loads(processes, divided, case, tmp_path / "True", False)


def norms(rank: int, zero: bool) -> list[Tensor | None]:
    with pipe_on(MeshShape(1, 2, 2)) as pipe:
        make, options = KINDS["Muon"]
        optimizer = PipelineOptimizer(pipe, make, clip=0.5, zero=zero, **options)
        told = []
        for step in range(3):
            pipe.step(*tokens(step))
            told.append(optimizer.step().grad_norm)
        return told


@pytest.mark.slow
def test_the_norm_counts_owned_parts_of_matrices_once(processes: LocalProcesses):
    for divided, whole in zip(*run_cases(processes, 4, norms, [(True,), (False,)]), strict=True):
        torch.testing.assert_close(divided[0], whole[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(divided, whole, rtol=1e-3, atol=0)


def other_arguments(rank: int, given: list[dict[str, Any]]) -> list[str]:
    told = []
    for by_rank in given:
        with pipe_on(MeshShape(pp=2)) as pipe, pytest.raises(ConfigError) as error:
            PipelineOptimizer(pipe, **{"optimizer": torch.optim.AdamW, "lr": 0.01, **by_rank[rank]})
        told.append(str(error.value))
    return told


def test_processes_that_give_other_arguments_are_told(processes: LocalProcesses):
    own = [{"match": "proj", "optimizer": torch.optim.SGD, "lr": 0.1}]
    given = [
        ({}, {"lr": 0.02}),
        ({"groups": own}, {"groups": [{**own[0], "lr": 0.3}]}),
        ({"optimizer": torch.optim.SGD}, {}),
        ({"clip": -1}, {}),
    ]
    told, other = processes.run(2, other_arguments, given)
    assert told == other
    facts = [
        ("lr is 0.01 on rank 0", "0.02 on rank 1"),
        ("groups[0].lr is 0.1 on rank 0",),
        ("optimizer is SGD on rank 0", "AdamW on rank 1"),
        ("clip is -1 on rank 0",),
    ]
    assert all(fact in text for text, own in zip(told, facts, strict=True) for fact in own), told
