"""Experts divided over processes: losses, gradients and weights are those of one process, to the order of sums."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import MeshShape, ParallelOptions, Pipeline, PipelineOptimizer
from penstock.parallel.dtensor import full_tensor
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.groups import run_cases
from tests.support.mixtures import batch, loss_of, mixture

MICROBATCHES, STEPS = 2, 5
Result = tuple[list[float], float, dict[str, Tensor], dict[str, Tensor]]


def plain(lone: bool = False, parts: int = MICROBATCHES) -> Result:
    """Return the losses, the last norm, and the first step's gradients and last weights of one process."""
    net = mixture(lone=lone)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses, norm, first = [], 0.0, {}
    for _ in range(STEPS):
        total = 0.0
        for x, y in zip(*(t.chunk(parts) for t in batch()), strict=True):
            loss = loss_of(net(x), y) / parts
            loss.backward()
            total += loss.item()
        if not first:
            first = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norm, first, {n: p.detach().clone() for n, p in net.named_parameters()}


def divided(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> Result:
    options = dict(options)
    zero, lone, recompute = (options.pop(key, default) for key, default in (("zero", False), ("lone", False), ("recompute", "none")))
    net = mixture(lone=lone)
    with Pipeline(
        net, loss_of, microbatches=MICROBATCHES, mesh=MeshShape(**sizes), timeout=60,
        schedule=options.get("schedule", "1f1b"), virtual_stages=options.get("virtual_stages", 1), recompute=recompute,
    ) as pipe:  # fmt: skip
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, clip=1.0, zero=zero)
        losses, norm, first = [], 0.0, {}
        for _ in range(STEPS):
            losses.append(pipe.step(*batch()).loss.item())
            if not first and not zero:
                first = {n: full_tensor(p.grad).clone() for n, p in pipe.named_parameters() if p.grad is not None}
            step = optimizer.step()
            norm = float(step.grad_norm)
        weights = {n: full_tensor(p.detach()).clone() for n, p in pipe.named_parameters()}
    return losses, norm, first, weights


CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2, "ep": 2}, {}),
    ({"dp": 2, "ep": 2}, {"zero": True}),
    ({"dp": 2, "ep": 2}, {"lone": True}),
    ({"dp": 2, "ep": 2}, {"recompute": "full"}),
    ({"pp": 1, "tp": 2, "ep": 2}, {}),
]


@pytest.mark.slow
def test_two_processes_give_what_one_gives(processes: LocalProcesses):
    compare(run_cases(processes, 2, divided, CASES), CASES)


FOUR: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"pp": 2, "dp": 2, "ep": 2}, {}),
    ({"pp": 2, "dp": 2, "ep": 2}, {"schedule": "zb-h1"}),
    ({"pp": 2, "dp": 2, "ep": 2}, {"schedule": "interleaved-1f1b", "virtual_stages": 2, "zero": True}),
    ({"pp": 2, "dp": 2, "ep": 2}, {"schedule": "zb-v"}),
    ({"dp": 4, "ep": 4}, {}),
    ({"dp": 4, "ep": 2}, {}),
    ({"dp": 4, "ep": 2}, {"zero": True}),
]


@pytest.mark.slow
def test_four_processes_give_what_one_gives(processes: LocalProcesses):
    compare(run_cases(processes, 4, divided, FOUR), FOUR)


def compare(results: list[list[Result]], cases: list[tuple[dict[str, int], dict[str, Any]]]) -> None:
    for (sizes, options), by_rank in zip(cases, results, strict=True):
        parts = MICROBATCHES * sizes.get("dp", 1)
        losses, norm, gradients, weights = plain(options.get("lone", False), parts)
        for found, found_norm, found_gradients, found_weights in by_rank:
            assert found == pytest.approx(losses, rel=1e-5), (sizes, options)
            assert found_norm == pytest.approx(norm, rel=1e-4), (sizes, options)
            for name, gradient in found_gradients.items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6, msg=lambda m: f"{sizes} {options} {name}: {m}")
            for name, weight in found_weights.items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-4, msg=lambda m: f"{sizes} {options} {name}: {m}")
        for name in by_rank[0][3]:
            copies = [r[3][name] for r in by_rank if name in r[3]]
            assert all(torch.equal(copies[0], other) for other in copies), (sizes, options, name)
