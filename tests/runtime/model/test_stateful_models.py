"""States in Python that a forward, a loss or a mode has: as in plain PyTorch, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.base.errors import SplitError
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support import stateful_models as models
from tests.support.stateful_models import Tower, tower

M = 4


def plainly(model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(3):
        found.append(plain.step(model, loss_fn, *plain.batch(step, 8), M)[0])
        optimizer.step()
        optimizer.zero_grad()
    return found


def piped(model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    found = []
    with penstock.Pipeline(model, loss_fn, ranks=2, microbatches=M) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        for step in range(3):
            found.append(pipe.step(*plain.batch(step, 8)).losses)
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kind", [models.CountingAndDrawing, models.SkipsOne])
def test_the_first_steps_comparison_moves_no_state_of_the_forward(kind: type[Tower]):
    for one, other in zip(plainly(tower(kind), F.mse_loss), piped(tower(kind), F.mse_loss), strict=True):
        assert torch.equal(one, other)


def test_a_loss_that_counts_its_calls_is_called_once_for_each_microbatch():
    loss = models.CountingLoss()
    for one, other in zip(
        plainly(tower(Tower), models.CountingLoss()), piped(tower(Tower), loss), strict=True
    ):
        assert torch.equal(one, other)
    assert loss.calls == 3 * M


def test_a_cache_that_blocks_share_is_allowed():
    expected = plainly(tower(Tower, models.SharingBlock), F.mse_loss)
    for one, other in zip(expected, piped(tower(Tower, models.SharingBlock), F.mse_loss), strict=True):
        assert torch.equal(one, other)


def refused(rank: int) -> None:
    with pytest.raises(SplitError, match=r"shared is one Context.*'total'"):
        piped(tower(Tower, models.AddingBlock), F.mse_loss)


def test_a_number_that_blocks_share_and_change_is_refused_by_name(processes: LocalProcesses):
    refused(0)
    processes.run(2, refused)


def test_an_evaluation_calls_a_train_of_a_modules_own():
    model = tower(Tower, models.Merging)
    x, y = plain.batch(0, 8)
    with penstock.Pipeline(model, F.mse_loss, ranks=2, microbatches=1) as pipe:
        evaluated = pipe.evaluate(x, y).loss
        trained = pipe.step(x, y).loss
    assert trained is not None
    assert torch.equal(trained, F.mse_loss(model(x), y).detach())
    assert torch.equal(evaluated, F.mse_loss(model.eval()(x), y).detach())


def test_getattr_of_a_module_that_another_layer_calls_is_refused():
    with pytest.raises(SplitError, match="getattr"):
        piped(tower(models.Peeking), F.mse_loss)


def test_a_loss_that_reads_what_blocks_keep_is_refused_by_name():
    model = tower(Tower, models.Remembering)
    with pytest.raises(SplitError, match=r"reads 'last'.*blocks\.0"):
        piped(model, lambda out, y: F.mse_loss(out, y) + sum(block.last for block in model.blocks))
