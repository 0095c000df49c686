"""A pipeline on torch's own mesh has the numbers of plain PyTorch, whatever the order of the mesh's dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.base.errors import ConfigError
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.parallel.mesh import MeshShape, make_mesh
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.parallel.trained import built_in, require_same
from tests.support import plain
from tests.support.groups import run_cases

M, STEPS = 4, 3

Trained = tuple[list[Tensor], dict[str, Tensor]]


def train(mesh: Any, replicas: int = 1, folder: Path | None = None) -> Trained:
    """Losses and weights of three steps of the model that `plain` trains."""
    with Pipeline(
        plain.model(4), nn.functional.mse_loss, microbatches=M // replicas, mesh=mesh, timeout=120
    ) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, clip=0.5)
        losses = []
        for step in range(STEPS):
            losses.append(pipe.step(*plain.batch(step, 2 * M)).losses)
            optimizer.step()
        if folder is not None:
            with Checkpoints(folder, pipe, optimizer) as checkpoints:
                checkpoints.save()
        return losses, pipe.state_dict()


def compare(trained: Trained, bits: bool) -> None:
    losses, weights, _ = plain.train(4, M, STEPS)
    own = [(value, weights[name]) for name, value in trained[1].items()]  # of this process's stages
    for found, wanted in [*zip(trained[0], losses, strict=True), *own]:
        if bits:
            assert torch.equal(found, wanted)
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def on_mesh(rank: int, names: tuple[str, ...], sizes: tuple[int, ...], slice_: str | None) -> Trained:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    dp = dict(zip(names, sizes, strict=True)).get("dp", 1) if slice_ is None else 1
    return train(mesh if slice_ is None else mesh[slice_], dp)


@pytest.mark.slow
@pytest.mark.parametrize("slices", [False, True], ids=["whole meshes", "slices"])
def test_dimensions_are_taken_by_name_in_any_order(processes: LocalProcesses, slices: bool):
    cases: list[tuple[Any, ...]] = [
        (("pp", "dp"), (2, 2), None), (("dp", "pp"), (2, 2), None), (("tp", "dp", "pp"), (1, 1, 4), None),
    ]  # fmt: skip
    if slices:
        cases = [(("pp", "dp"), (2, 2), "pp"), (("dp", "pp"), (2, 2), "pp"), (("other", "pp"), (4, 1), "pp")]
    for (names, sizes, slice_), results in zip(cases, run_cases(processes, 4, on_mesh, cases), strict=True):
        summed_otherwise = slice_ is None and dict(zip(names, sizes, strict=True)).get("dp", 1) > 1
        for trained in results:
            compare(trained, bits=not summed_otherwise)


def on_some(rank: int, folder: str) -> Trained | str:
    mesh = DeviceMesh("cpu", torch.tensor([0, 2]), mesh_dim_names=("pp",))
    if rank not in (0, 2):
        with pytest.raises(ConfigError, match=r"this process is not in the mesh, which has the ranks 0, 2"):
            train(mesh)
        return "outside"
    first = train(mesh, folder=Path(folder))
    again = train(mesh)  # in the same processes: no group meets the addresses of one that is gone
    assert all(torch.equal(a, b) for a, b in zip(first[0], again[0], strict=True))
    return again


def test_a_mesh_of_some_processes_trains_and_saves_without_the_others(
    processes: LocalProcesses, tmp_path: Path
):
    results = processes.run(4, on_some, str(tmp_path))
    assert results[1] == results[3] == "outside"
    compare(results[0], bits=True)
    compare(results[2], bits=True)
    assert [path.name for path in tmp_path.iterdir()]


def refused(
    rank: int, names: tuple[str, ...] | None, places: list[list[int]], options: dict[str, Any]
) -> str:
    mesh = DeviceMesh("cpu", torch.tensor(places), mesh_dim_names=names)
    with pytest.raises(ConfigError) as error:
        Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=M, mesh=mesh, **options)
    return str(error.value)


def test_a_mesh_that_cannot_be_used_is_refused_by_name(processes: LocalProcesses):
    square = [[0, 1], [2, 3]]
    cases: list[tuple[tuple[str, ...] | None, list[list[int]], dict[str, Any]]] = [
        (("pipe", "data"), square, {}), (("pp", "ep"), square, {}), (None, square, {}),
        (("dp", "pp"), square, {"ranks": 4}), (("dp", "pp"), [[1, 0], [2, 3]], {}),
    ]  # fmt: skip
    says = [
        "must be called pp, dp, cp and tp, got pipe, data (2 x 2); call pipe pp, call data dp",
        "got pp, ep (2 x 2); give the slice of the mesh without ep",
        "the dimensions of the mesh (2 x 2) must have names of pp, dp, cp and tp",
        "the mesh has 2 pipeline ranks, but ranks=4",
        "the ranks of the mesh must ascend along pp, got [[1, 0], [2, 3]]",
    ]
    for by_rank, said in zip(run_cases(processes, 4, refused, cases), says, strict=True):
        assert all(said in text for text in by_rank)


def test_what_is_no_mesh_is_refused():
    with pytest.raises(ConfigError, match=r"mesh must be a MeshShape, or a mesh of torch's .* got \(2, 2\)"):
        Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=M, mesh=(2, 2))


def on_made_mesh(rank: int) -> Trained:
    return train(make_mesh(pp=2, dp=2, order=("tp", "dp", "pp")), 2)


def without_cpu(rank: int, path: str) -> Trained:
    """As where a group was initialised for GPUs alone, such as "nccl": it exchanges nothing in host memory."""
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    return train(MeshShape(pp=2, dp=2), 2)


def test_a_mesh_of_ours_and_a_group_without_the_cpu_are_taken_as_they_are(
    processes: LocalProcesses, tmp_path: Path
):
    for results in (processes.run(4, on_made_mesh), processes.run(4, without_cpu, str(tmp_path / "store"))):
        for trained in results:
            compare(trained, bits=False)


def timeout_of_the_default_group(rank: int) -> None:
    def found() -> float:
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    before = found()
    with Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=M, timeout=17.0) as pipe:
        pipe.step(*plain.batch(0, M))
        assert before == found() != 17


def test_a_default_group_of_the_users_own_keeps_its_timeout(processes: LocalProcesses):
    processes.run(2, timeout_of_the_default_group)


@pytest.mark.slow
def test_sharded_matrices_on_a_named_mesh_equal_one_process():
    """In processes of its own: torch's cache of operations on DTensors keeps a mesh, which outlives its groups."""
    cases = [
        (("pp", 2), ("tp", 2)), (("tp", 2), ("pp", 2)), (("dp", 1), ("pp", 2), ("tp", 2)), (("dp", 2), ("pp", 1), ("tp", 2)),
        (("dp", 2), ("pp", 2), ("tp", 1)),
    ]  # fmt: skip
    expected = built_in(0, None)
    with LocalProcesses(4) as own:
        for case, results in zip(
            cases, run_cases(own, 4, built_in, [(case,) for case in cases]), strict=True
        ):
            require_same(case, results, expected)
