"""Layers that torch's own parts shard, beside a pipeline on a slice of the mesh: the numbers of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.base.errors import ConfigError
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.groups import run_cases

M, STEPS, CLIP = 4, 3, 0.05


def model() -> nn.Sequential:
    torch.manual_seed(0)
    width = plain.WIDTH
    blocks = [nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)) for _ in range(4)]
    return nn.Sequential(*blocks)


def plain_losses() -> list[Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses, _ = plain.step(net, nn.functional.mse_loss, *plain.batch(step, 2 * M), M)
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        history.append(losses)
    return history


def placed(kind: str, mesh: DeviceMesh) -> nn.Sequential:
    """The model, each block placed on the mesh's other dimension."""
    net = model()
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in net:
            fully_shard(block, mesh=mesh["dp"])
    elif kind == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for block in net:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        group = mesh["dp"].get_group()
        net = nn.Sequential(*[nn.parallel.DistributedDataParallel(b, process_group=group) for b in net])
    return net


def train(rank: int, kind: str, schedule: str, own_optimizer: bool) -> tuple[int, list[Tensor]]:
    other, replicas = ("tp", 1) if kind == "tp" else ("dp", 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", other))
    replica = mesh["dp"].get_local_rank() if replicas == 2 else 0
    rows = slice(replica * 2 * M // replicas, (replica + 1) * 2 * M // replicas)
    with Pipeline(
        placed(kind, mesh),
        nn.functional.mse_loss,
        schedule=schedule,
        microbatches=M // replicas,
        mesh=mesh["pp"],
        timeout=60,
    ) as pipe:
        options: dict[str, Any] = {"lr": 0.1}
        if own_optimizer:
            optimizer: Any = PipelineOptimizer(pipe, torch.optim.SGD, clip=CLIP, **options)
        else:
            optimizer = torch.optim.SGD(pipe.parameters(), **options)
        history = []
        for step in range(STEPS):
            x, y = plain.batch(step, 2 * M)
            history.append(pipe.step(x[rows], y[rows]).losses)
            if not own_optimizer:
                pipe.clip_grad_norm_(CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return replica, history


def refused(rank: int, kind: str, whole: bool, schedule: str = "1f1b") -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with pytest.raises(ConfigError) as error:
        Pipeline(
            placed(kind, mesh), nn.functional.mse_loss, schedule=schedule, microbatches=2,
            mesh=mesh if whole else mesh["pp"], timeout=60,
        )  # fmt: skip
    return str(error.value)


def refused_in_a_step(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with Pipeline(
        placed("fsdp", mesh), nn.functional.mse_loss, schedule="tests.support.own_schedules:split_from_six",
        microbatches=2, mesh=mesh["pp"], timeout=60,
    ) as pipe:  # fmt: skip
        for number in (2, 5):
            pipe.step(*plain.batch(0, 12), microbatches=number)
        with pytest.raises(ConfigError) as error:
            pipe.step(*plain.batch(0, 12), microbatches=6)
    return str(error.value)


@pytest.mark.slow
def test_layers_sharded_by_torch_train_as_plain_pytorch_or_are_refused():
    """In processes of its own, as torch's cache of operations on DTensors outlives a mesh's groups."""
    cases = [("fsdp", "1f1b", True), ("fsdp", "1f1b", False), ("tp", "1f1b", True)]
    wanted = plain_losses()
    with LocalProcesses(4) as own:
        for case, results in zip(cases, run_cases(own, 4, train, cases), strict=True):
            for replica, history in results:
                for losses, all_losses in zip(history, wanted, strict=True):
                    part = all_losses[replica * len(losses) :][: len(losses)]
                    torch.testing.assert_close(losses, part, rtol=1e-5, atol=1e-6, msg=str(case))
        cases_refused = [("ddp", False), ("fsdp", True), ("fsdp", False, "zb-h1")]
        ddp, sharded, split = run_cases(own, 4, refused, cases_refused)
        in_a_step = own.run(4, refused_in_a_step)
    assert all("has a DistributedDataParallel, which expects one backward for each" in text for text in ddp)
    assert all("the schedule zb-h1 splits backwards; take one without W ops" in text for text in split)
    assert all("splits backwards; take one without W ops" in text for text in in_a_step)
    assert all("is a DTensor already, but the mesh (tp 1 x pp 2 x dp 2" in text for text in sharded)
