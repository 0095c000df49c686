"""Trainings in processes and in one, for layouts whose processes divide tensors, experts or samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from penstock import MeshShape, Pipeline, PipelineOptimizer
from penstock.parallel.dtensor import full_tensor
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

MICROBATCHES, STEPS = 2, 4
Tensors = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
CONFIG = ModelConfig(vocabulary=18, width=16, layers=4, heads=4, kv_heads=2, hidden=32)


class Result(NamedTuple):
    losses: list[float]  # of each step
    each: Tensor | None  # of the last step's microbatches
    norm: float | None  # of the last step
    gradients: Tensors  # of the first step; none with ZeRO
    weights: Tensors  # after the last


def trained(pipe: Pipeline, optimizer: PipelineOptimizer, batch: Batch, steps: int = STEPS) -> Result:
    """Train on the same batch in each step."""
    losses, first = [], Tensors()
    for _ in range(steps):
        result = pipe.step(*batch)
        assert result.loss is not None
        losses.append(result.loss.item())
        named = pipe.named_parameters() if pipe.shards is None else ()  # ZeRO's gradients are divided
        first = first or {n: full_tensor(p.grad).clone() for n, p in named if p.grad is not None}
        norm = optimizer.step().grad_norm
    weights = {n: full_tensor(p.detach()).clone() for n, p in pipe.named_parameters()}
    return Result(losses, result.losses, None if norm is None else float(norm), first, weights)


def plain(
    net: nn.Module, loss_of: Callable[..., Tensor], batch: Batch, parts: int, clip: float = 1e9
) -> Result:
    """Train as `trained` does, in plain PyTorch; a microbatch counts by its targets."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses, first, (x, y) = [], Tensors(), batch
    for _ in range(STEPS):
        each = [loss_of(net(a), b) for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)]
        shares = [(b != -100).sum() / (y != -100).sum() for b in y.chunk(parts)]
        total = sum(a * share for a, share in zip(each, shares, strict=True))
        total.backward()
        first = first or {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(net.parameters(), clip).item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    weights = {n: p.detach().clone() for n, p in net.named_parameters()}
    return Result(losses, torch.stack(each).detach(), norm, first, weights)


def require_same(case: Any, by_rank: list[Result], expected: Result) -> None:
    """All have one process's numbers to the order of sums, and copies of a weight the same bits."""
    seen: dict[str, list[Tensor]] = {}
    for got in by_rank:
        assert got.losses == pytest.approx(expected.losses, rel=1e-5), case
        assert got.norm is None or got.norm == pytest.approx(expected.norm, rel=1e-4), case
        for name, gradient in got.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-4, atol=1e-6)
        # AdamW divides by the root of the square: errors of small gradients are as large as of large ones.
        for name, weight in got.weights.items():
            seen.setdefault(name, []).append(weight)
            torch.testing.assert_close(weight, expected.weights[name], rtol=1e-3, atol=2e-4)
    assert seen.keys() == expected.weights.keys()
    for name, copies in seen.items():
        assert all(torch.equal(copies[0], other) for other in copies), (case, name)


def tokens(rows: int = 8, sequence: int = 32, classes: int = 17) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(classes, (2, rows, sequence), generator=generator)
    return x, y


def built_in(rank: int, mesh: Any, schedule: str = "1f1b", replicas: int = 1) -> Result:
    """Train the built-in model; of a tuple of (name, size) a mesh of torch's is made, and None is one process."""
    if isinstance(mesh, tuple):
        from torch.distributed.device_mesh import init_device_mesh

        names, sizes = zip(*mesh, strict=True)
        mesh, replicas = init_device_mesh("cpu", sizes, mesh_dim_names=names), dict(mesh).get("dp", 1)
    options = {"mesh": MeshShape(**mesh) if isinstance(mesh, dict) else mesh} if mesh else {"ranks": 1}
    with Pipeline(
        layers(CONFIG), next_token_loss, microbatches=MICROBATCHES // replicas, timeout=120, schedule=schedule, **options
    ) as pipe:  # fmt: skip
        return trained(pipe, PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, clip=0.5), tokens())
