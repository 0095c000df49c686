"""Replicas for tests: models and batches that all processes make alike, and their buckets, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from penstock.parallel.replicas.buckets import GradientBuckets
from penstock.parallel.replicas.reducer import GroupReducer

WIDTH, ROWS = 6, 12


def reducer_of_all(timeout: float = 300.0) -> GroupReducer:
    """The communicator of all processes."""
    group = dist.group.WORLD
    assert group is not None, "a process of a group"
    return GroupReducer(group, timeout)


def buckets_of(net: nn.Module, reducer: GroupReducer | None = None, **options: Any) -> GradientBuckets:
    """Attached buckets of a model; small by default, so that there are many."""
    small = {"bucket_bytes": 400, "first_bucket_bytes": 100}
    buckets = GradientBuckets(net.named_parameters(), reducer or reducer_of_all(), **{**small, **options})
    buckets.attach()
    return buckets


@contextmanager
def step(
    buckets: GradientBuckets, number: int = 1, contributions: int | Mapping[torch.Tensor, int] = 1
) -> Iterator[None]:
    """One step, as a pipeline takes it: every gradient is complete after as many contributions."""
    if isinstance(contributions, int):
        contributions = dict.fromkeys((e.parameter for e in buckets.entries), contributions)
    buckets.begin(contributions, number)
    try:
        yield
    except Exception as error:
        buckets.abandon(error)
        raise
    buckets.finish()


def model(seed: int = 0, layers: int = 4) -> nn.Sequential:
    """Linear layers with norms between; the same for the same seed."""
    net = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(layers)]
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return net


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def share(number: int, rank: int, size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """A replica's rows of the global batch."""
    x, y = batch(number)
    return x.chunk(size)[rank], y.chunk(size)[rank]


def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(net(x), y)


def gradients(net: nn.Module) -> dict[str, torch.Tensor | None]:
    """By name."""
    return {name: p.grad.clone() if p.grad is not None else None for name, p in net.named_parameters()}


def plain(number: int, size: int = 2) -> dict[str, torch.Tensor]:
    """Gradients of one process that runs every replica's share, in order."""
    net = model()
    for rank in range(size):
        loss_of(net, *share(number, rank, size)).backward()
    return {name: grad for name, grad in gradients(net).items() if grad is not None}
