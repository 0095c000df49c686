"""The one executor runs every family of the catalogue with the gradients of plain PyTorch, whenever values arrive."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import FAMILIES
from penstock.verify import verify
from tests.runtime.test_equality import allowed
from tests.support import plain
from tests.support.lanes import exhaustive

SUBJECT = "penstock.train.model.verify_target:small_llama"
OTHERS = [
    (f, p, m) for f, p in itertools.product(FAMILIES, (2, 4)) for m in (p, 2 * p, 7) if allowed(f, p, m)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks", "microbatches"),
    [*((family, 4, 11) for family in FAMILIES if allowed(family, 4, 11)), *exhaustive(*OTHERS)],
)
def test_threads_run_the_family(family, ranks, microbatches):
    (row,) = verify(SUBJECT, [(family, 1)], [ranks], [microbatches], transports=["threads"])
    assert row.good, row
    if FAMILIES[family].in_order:
        assert row.loss == row.weights == row.gradients == 0.0
    else:
        assert 0.0 < max(row.allowed) < 1e-2


class Dawdle(nn.Module):
    """Takes a random little while, in the forward and in the backward."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pause()
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda grad: self.pause())
        return y

    def pause(self) -> None:
        time.sleep(self.random.random() * 0.001)


# One stage a rank, waves of stages with split backwards, and copies of stages.
FAST = ("1f1b", "v-half", "chimera")


@pytest.mark.parametrize("family", [*FAST, *exhaustive(*(name for name in FAMILIES if name not in FAST))])
def test_uneven_arrival_changes_nothing(family):
    results = []
    for dawdle in (False, True):
        net = plain.model(8)
        if dawdle:
            for n, layer in enumerate(net):
                layer.append(Dawdle(n))
        with Pipeline(net, mse_loss, microbatches=8, ranks=4, schedule=family) as pipe:
            losses = pipe.step(*plain.batch(0, 8)).losses
        results.append([losses, *(p.grad for p in net.parameters())])
    for steady, uneven in zip(*results, strict=True):
        assert torch.equal(steady, uneven)


def test_copies_accumulate_over_steps_and_count_nothing_twice():
    net, other = plain.model(4), plain.model(4)
    with Pipeline(net, mse_loss, microbatches=4, ranks=2, schedule="chimera") as pipe:
        for n in range(3):
            pipe.step(*plain.batch(n, 8))
            plain.step(other, mse_loss, *plain.batch(n, 8), 4)
        norm = pipe.clip_grad_norm_(0.1)
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(other.parameters(), 0.1).item(), rel=1e-6)
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


def unequal_copies(rank: int) -> dict[str, torch.Tensor]:
    with Pipeline(plain.model(4, seed=rank), mse_loss, microbatches=4, ranks=2, schedule="chimera") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for n in range(3):
            pipe.step(*plain.batch(n, 8))
            optimizer.step()
            optimizer.zero_grad()
        return {n: p.detach() for n, p in pipe.named_parameters()}


def test_copies_in_processes_start_equal_and_stay_bit_identical(processes: LocalProcesses):
    first, second = processes.run(2, unequal_copies)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name])
