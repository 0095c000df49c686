"""Reductions on a separate CUDA stream, for which the compute stream waits. Skipped without a CUDA device.

`Late` keeps the device busy before it passes a gradient on, so that a stream that does not wait reads old values.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.parallel.data.buckets import GradientBuckets
from penstock.parallel.data.reducer import GroupReducer
from penstock.parallel.data.zero import ShardedOptimizer
from tests.support.replicas import WIDTH, gradients, loss_of, model, share, together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
SMALL = {"bucket_bytes": 400, "first_bucket_bytes": 100}
ROWS = 12


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


def shares(n: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = share(n, ROWS, rank, size)
    return x.cuda(), y.cuda()


def expected(n: int, size: int) -> dict[str, torch.Tensor]:
    net = on_device(late=False)
    for rank in range(size):
        (loss_of(net, *shares(n, rank, size)) / size).backward()
    return gradients(net)


def assert_close(actual: dict, other: dict) -> None:
    for name, grad in other.items():
        assert torch.allclose(actual[name].cpu(), grad.cpu(), rtol=1e-4, atol=1e-6), name


def test_replicas_in_threads_wait_for_each_others_streams():
    def body(reducer):
        with torch.cuda.stream(torch.cuda.Stream()):
            net = on_device()
            buckets = GradientBuckets(net, reducer, **SMALL)
            buckets.attach()
            for n in range(4):
                net.zero_grad(set_to_none=n % 2 == 0)
                with buckets.step():
                    loss_of(net, *shares(n, reducer.rank, 2)).backward()
                actual = gradients(net)
            torch.cuda.synchronize()
            return actual

    first, second = together(2, body)
    assert_close(first, expected(3, 2))
    for name in first:
        assert torch.equal(first[name], second[name])


def test_the_host_does_not_wait_for_the_device():
    (reducer,) = together(1, lambda r: r)
    net = on_device()
    buckets = GradientBuckets(net, reducer, **SMALL)
    buckets.attach()
    batches = [shares(n, 0, 1) for n in range(3)]
    for n in range(3):
        net.zero_grad()
        if n == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            with buckets.step():
                loss_of(net, *batches[n]).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_close(gradients(net), expected(2, 1))


def test_bfloat16_gradients_are_added_in_float32():
    def body(reducer):
        net = nn.Linear(WIDTH, WIDTH).cuda().bfloat16()
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(0.5)
        buckets = GradientBuckets(net, reducer, reduce_dtype=torch.float32)
        for p in net.parameters():
            p.grad = torch.full_like(p, 1.0 + reducer.rank / 128)
        buckets.begin()
        for p in net.parameters():
            buckets.ready(p)
        buckets.finish()
        torch.cuda.synchronize()
        return gradients(net)

    for actual in together(2, body):
        for grad in actual.values():
            assert torch.equal(grad, torch.full_like(grad, 1.0 + 1 / 256))


def test_a_divided_optimizer_collects_its_parameters_in_time():
    def body(reducer):
        with torch.cuda.stream(torch.cuda.Stream()):
            net = on_device()
            optimizer = ShardedOptimizer(net, torch.optim.AdamW, reducer, layers=net, lr=1e-2, **SMALL)
            for n in range(4):
                with optimizer.reducing():
                    loss_of(net, *shares(n, reducer.rank, 2)).backward()
                optimizer.step()
            optimizer.wait_all()
            torch.cuda.synchronize()
            return {name: p.detach().clone() for name, p in net.named_parameters()}

    net = on_device(late=False)
    plain_optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for n in range(4):
        plain_optimizer.zero_grad()
        for rank in range(2):
            (loss_of(net, *shares(n, rank, 2)) / 2).backward()
        plain_optimizer.step()
    for actual in together(2, body):
        for name, p in net.named_parameters():
            assert torch.allclose(actual[name], p, rtol=1e-3, atol=1e-4), name


def over_gloo(rank: int) -> dict[str, torch.Tensor]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    net = on_device()
    buckets = GradientBuckets(net, GroupReducer(timeout=300), **SMALL)
    buckets.attach()
    for n in range(3):
        net.zero_grad()
        with buckets.step():
            loss_of(net, *shares(n, rank, 2)).backward()
    return {name: grad.cpu() for name, grad in gradients(net).items()}


def test_processes_that_share_a_device_reduce_through_gloo(processes):
    for actual in processes.run(2, over_gloo, timeout=300):
        assert_close(actual, expected(2, 2))
