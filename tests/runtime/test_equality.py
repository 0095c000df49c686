"""The main oracle: pipelined training gives bit for bit what plain PyTorch gives."""

from __future__ import annotations

import itertools
import os
from functools import cache

import pytest
import torch
from torch import nn

from penstock.runtime.pipeline import Pipeline
from penstock.runtime.transport.processes import SWITCH
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.groups import run_cases

FAMILIES = ["gpipe", "1f1b", "interleaved-1f1b"]
CASES = [
    (family, ranks, microbatches)
    for family, ranks in itertools.product(FAMILIES, [1, 2, 4])
    for microbatches in sorted({ranks, 2 * ranks, 7})
]


def pipelined(rank: int, family: str, ranks: int, microbatches: int):
    """Three steps through a pipeline; what this process holds of losses, weights and gradients."""
    torch.set_num_threads(1)
    virtual = 2 if family == "interleaved-1f1b" else 1
    with Pipeline(
        plain.model(8), nn.functional.mse_loss, microbatches=microbatches, schedule=family, ranks=ranks,
        virtual_stages=virtual,
    ) as pipe:  # fmt: skip
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        history = []
        for n in range(3):
            optimizer.zero_grad()
            result = pipe.step(*plain.batch(n, 2 * microbatches))
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            assert torch.equal(result.loss, result.losses.mean())
            history.append(result.losses)
        weights = {n: p.detach() for n, p in pipe.named_parameters()}
        return history, weights, {n: p.grad for n, p in pipe.named_parameters()}


def pipelined_through_the_group(rank: int, *case) -> object:
    os.environ[SWITCH] = "0"
    try:
        return pipelined(rank, *case)
    finally:
        del os.environ[SWITCH]


@cache
def plainly(microbatches: int):
    return plain.train(8, microbatches)


def assert_same(parts, microbatches: int) -> None:
    history, weights, grads = plainly(microbatches)
    seen_weights, seen_grads = {}, {}
    for losses, part, part_grads in parts:
        for ours, theirs in zip(losses, history, strict=True):
            assert torch.equal(ours, theirs)
        seen_weights.update(part)
        seen_grads.update(part_grads)
    assert seen_weights.keys() == weights.keys()
    for name in weights:
        assert torch.equal(seen_weights[name], weights[name]), name
        assert torch.equal(seen_grads[name], grads[name]), name


@pytest.mark.parametrize(("family", "ranks", "microbatches"), CASES)
def test_threads_give_the_losses_weights_and_gradients_of_plain_pytorch(family, ranks, microbatches):
    assert_same([pipelined(0, family, ranks, microbatches)], microbatches)


@pytest.fixture(scope="module")
def in_processes(processes: LocalProcesses) -> dict[tuple, list]:
    parts = {}
    for ranks in (1, 2, 4):
        cases = [case for case in CASES if case[1] == ranks]
        parts |= dict(zip(cases, run_cases(processes, ranks, pipelined, cases), strict=True))
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_processes_give_the_losses_weights_and_gradients_of_plain_pytorch(in_processes, case):
    assert_same(in_processes[case], case[2])


def test_processes_without_shared_memory_give_the_same(processes: LocalProcesses):
    cases = [(family, 2, 4) for family in FAMILIES]
    for parts in run_cases(processes, 2, pipelined_through_the_group, cases):
        assert_same(parts, 4)
