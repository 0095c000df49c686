"""Reductions on a separate CUDA stream, for which the compute stream waits. Skipped without a CUDA device.

`Late` keeps the device busy before it passes a gradient on, so that a stream that does not wait reads old values.
"""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn

from penstock.parallel.mesh import MeshShape
from penstock.parallel.replicas.reducer import GroupReducer
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.groups import run_cases
from tests.support.replicas import batch, buckets_of, gradients, loss_of, model, share, step
from tests.support.states import assert_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + 0.0

    @staticmethod
    def backward(ctx, grad):
        matrix = torch.ones(4096, 4096, device="cuda")
        for _ in range(4):
            matrix @ matrix
        return grad + 0.0


class Late(nn.Module):
    def forward(self, x):
        return _Late.apply(x)


def on_device(late: bool = True) -> nn.Module:
    net = model()
    if late:
        for block in net:
            block.append(Late())
    return net.cuda()


def shares(n: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = share(n, rank)
    return x.cuda(), y.cuda()


def assert_close(actual: dict, other: dict) -> None:
    for name, grad in other.items():
        assert torch.allclose(actual[name].cpu(), grad.cpu(), rtol=1e-4, atol=1e-6), name


def reduces(rank: int) -> dict[str, torch.Tensor]:
    """Replicas that share a device, or have one each, and reduce through gloo."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with torch.cuda.stream(torch.cuda.Stream()):
        net = on_device()
        buckets = buckets_of(net)
        for n in range(4):
            net.zero_grad(set_to_none=n % 2 == 0)
            with step(buckets, n):
                loss_of(net, *shares(n, rank)).backward()
        actual = gradients(net)
        torch.cuda.synchronize()
    return {name: grad.cpu() for name, grad in actual.items()}


def test_replicas_wait_for_the_streams_that_fill_the_buckets(processes: LocalProcesses):
    net = on_device(late=False)
    for rank in range(2):
        loss_of(net, *shares(3, rank)).backward()
    first, second = processes.run(2, reduces, timeout=300)
    assert_close(first, gradients(net))
    assert_equal(first, second)


def stays_on_the_device(rank: int) -> dict[str, torch.Tensor]:
    net = on_device()
    group = dist.new_group([0], backend="cpu:gloo,cuda:nccl")
    buckets = buckets_of(net, GroupReducer(group, 300.0))
    batches = [shares(n, rank) for n in range(3)]
    for n in range(3):
        net.zero_grad()
        if n == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            with step(buckets, n):
                loss_of(net, *batches[n]).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {name: grad.cpu() for name, grad in gradients(net).items()}


def test_the_host_does_not_wait_for_the_device(processes: LocalProcesses):
    net = on_device(late=False)
    loss_of(net, *shares(2, 0)).backward()
    (actual,) = processes.run(1, stays_on_the_device, timeout=300)
    assert_close(actual, gradients(net))


def trains(rank: int, zero: bool) -> dict[str, torch.Tensor]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with Pipeline(
        on_device(), nn.functional.mse_loss, microbatches=1, mesh=MeshShape(dp=2), timeout=300,
        device=torch.device("cuda", rank % torch.cuda.device_count()),
    ) as pipe:  # fmt: skip
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, zero=zero and "overlap")
        for n in range(4):
            pipe.step(*batch(n))
            optimizer.step()
        return {name: p.detach().cpu() for name, p in pipe.named_parameters()}


def test_a_divided_optimizer_collects_its_parameters_in_time(processes: LocalProcesses):
    whole, divided = run_cases(processes, 2, trains, [(False,), (True,)])
    for actual in divided:
        for name, p in whole[0].items():
            assert torch.allclose(actual[name], p, rtol=1e-3, atol=1e-4), name
