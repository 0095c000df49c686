"""The one executor runs every family of the catalogue, in threads and in processes, with the gradients of plain PyTorch."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
from torch import nn

from penstock.base.errors import ScheduleError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.verify import Difference, verify
from tests.support import plain

SUBJECT = "penstock.train.model.verify_target:small_llama"
COUNTS = {p: [p, 2 * p, 2 * p + 3] for p in (2, 4)}


def allowed(family: str, ranks: int, microbatches: int) -> bool:
    try:
        build_schedule(family, ranks, microbatches)
    except ScheduleError:
        return False
    return True


CASES = [
    (family, p, m)
    for family, p in itertools.product(FAMILIES, COUNTS)
    for m in COUNTS[p]
    if allowed(family, p, m)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks", "microbatches"),
    [pytest.param(*case, marks=() if case[1:] == (4, 11) else pytest.mark.slow) for case in CASES],
)
def test_threads_run_the_family(family, ranks, microbatches):
    (row,) = verify(SUBJECT, [(family, 1)], [ranks], [microbatches], transports=["threads"])
    assert_good(row, family)


def assert_good(row: Difference, family: str) -> None:
    assert row.good, row
    if FAMILIES[family].in_order:
        assert row.loss == row.weights == row.gradients == 0.0
    else:
        assert 0.0 < max(row.allowed) < 1e-2


def losses_and_gradients(rank: int, cases: list[tuple[str, int]]) -> list[dict[str, torch.Tensor]]:
    """Run several cases in one group; much of a process test's time is the making of groups."""
    torch.set_num_threads(1)
    found = []
    for family, microbatches in cases:
        with Pipeline(
            plain.model(8), nn.functional.mse_loss, microbatches=microbatches, schedule=family
        ) as pipe:
            result = pipe.step(*plain.batch(0, 2 * microbatches))
            found.append({"losses": result.losses} | {n: p.grad for n, p in pipe.named_parameters()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=pytest.mark.slow if ranks > 2 else ()) for ranks in COUNTS]
)
def test_processes_run_every_family(processes: LocalProcesses, ranks):
    cases = [(f, m) for f, p, m in CASES if p == ranks]
    parts = processes.run(ranks, losses_and_gradients, cases, timeout=300)
    for n, (family, microbatches) in enumerate(cases):
        net = plain.model(8)
        losses, _ = plain.step(net, nn.functional.mse_loss, *plain.batch(0, 2 * microbatches), microbatches)
        seen = {name: value for part in parts for name, value in part[n].items()}
        assert torch.equal(seen.pop("losses"), losses), family
        for name, parameter in net.named_parameters():
            if FAMILIES[family].in_order:
                assert torch.equal(seen[name], parameter.grad), (family, name)
            else:  # one order of summing m numbers against another
                bound = 2 * microbatches * 2.0**-24 * parameter.grad.abs().max() * 8
                assert (seen[name] - parameter.grad).abs().max() <= bound, (family, name)


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
        time.sleep(self.random.random() * 0.002)


@pytest.mark.parametrize("family", FAMILIES)
def test_uneven_arrival_changes_nothing(family):
    results = []
    for dawdle in (False, True):
        net = plain.model(8)
        if dawdle:
            for n, layer in enumerate(net):
                layer.append(Dawdle(n))
        with Pipeline(net, nn.functional.mse_loss, microbatches=8, ranks=4, schedule=family) as pipe:
            losses = pipe.step(*plain.batch(0, 8)).losses
        results.append([losses, *(p.grad for p in net.parameters())])
    for steady, uneven in zip(*results, strict=True):
        assert torch.equal(steady, uneven)


def test_copies_accumulate_over_steps_and_count_nothing_twice():
    net, other = plain.model(4), plain.model(4)
    with Pipeline(net, nn.functional.mse_loss, microbatches=4, ranks=2, schedule="chimera") as pipe:
        for n in range(3):
            pipe.step(*plain.batch(n, 8))
            plain.step(other, nn.functional.mse_loss, *plain.batch(n, 8), 4)
        norm = pipe.clip_grad_norm_(0.1)
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(other.parameters(), 0.1).item(), rel=1e-6)
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


def unequal_copies(rank: int) -> dict[str, torch.Tensor]:
    with Pipeline(
        plain.model(4, seed=rank), nn.functional.mse_loss, microbatches=4, ranks=2, schedule="chimera"
    ) as pipe:
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
