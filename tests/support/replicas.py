"""Replicas for tests: a function run in threads, and models and batches that all of them make alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.parallel.data.thread_reducer import ThreadReducer, thread_reducers

WIDTH = 6


def each(count: int, body: Callable[[ThreadReducer], Any], timeout: float = 20.0) -> list[Any]:
    """What `body` returned on each replica, or the error it raised."""
    found: list[Any] = [None] * count

    def run(reducer: ThreadReducer) -> None:
        try:
            found[reducer.rank] = body(reducer)
        except Exception as error:
            found[reducer.rank] = error

    threads = [
        threading.Thread(target=run, args=(reducer,), daemon=True)
        for reducer in thread_reducers(count, timeout)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "a replica was left waiting"
    return found


def together(count: int, body: Callable[[ThreadReducer], Any]) -> list[Any]:
    """As `each`; the first error is raised."""
    found = each(count, body)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def model(seed: int = 0, layers: int = 4) -> nn.Sequential:
    """Linear layers with norms between; the same for the same seed, also in threads."""
    net = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(layers)]
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return net


def batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def share(step: int, rows: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A replica's rows of the global batch."""
    x, y = batch(step, rows)
    return x.chunk(size)[rank], y.chunk(size)[rank]


def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(net(x), y)


def gradients(net: nn.Module) -> dict[str, torch.Tensor | None]:
    """By name."""
    return {name: p.grad.clone() if p.grad is not None else None for name, p in net.named_parameters()}


def plain(step: int, rows: int, size: int) -> dict[str, torch.Tensor | None]:
    """Gradients of one process that runs every replica's share, in order, and divides the sum."""
    net = model()
    for rank in range(size):
        loss_of(net, *share(step, rows, rank, size)).backward()
    return {name: grad / size for name, grad in gradients(net).items() if grad is not None}
