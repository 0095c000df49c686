"""A loss function with parameters or buffers: trained as in plain PyTorch by one last stage, refused by name over copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.base.errors import ConfigError, StageError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain

COPIED = ["dualpipe", "chimera"]


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.log.exp(), target)


class Centred(nn.Module):
    """Keeps a running mean of the outputs, in place or as a new tensor each time."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("centre", torch.zeros(plain.WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        if self.in_place:
            self.centre.copy_(centre)
        else:
            self.centre = centre
        return F.mse_loss(output - centre, target)


class Weighted(nn.Module):
    """Has a constant, as a cross entropy with weights has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(plain.WIDTH))
        self.fixed = nn.Parameter(torch.ones(plain.WIDTH), requires_grad=False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).square() * self.weight * self.fixed).mean()


def pipeline(loss_fn: nn.Module, schedule: str, dp: int = 1, ranks: int = 2) -> Pipeline:
    mesh = MeshShape(ranks, dp)
    return Pipeline(plain.model(4), loss_fn, microbatches=4 // dp, schedule=schedule, mesh=mesh)


@pytest.mark.parametrize("schedule", COPIED)
def test_parameters_of_the_loss_are_refused_where_the_last_stage_has_copies(schedule: str):
    with pytest.raises(ConfigError, match=r"loss_fn \(Temperature\) has parameters to train: log;"):
        pipeline(Temperature(), schedule)


def refused(rank: int) -> str:
    with pytest.raises(ConfigError) as caught:
        pipeline(Temperature(), "1f1b", 2, ranks=1)
    with pipeline(Centred(True), "1f1b", 2, ranks=1) as pipe, pytest.raises(StageError) as changed:
        pipe.step(*plain.batch(0, 8))
    loss_fn = Weighted()
    with torch.no_grad():
        loss_fn.weight.copy_(torch.linspace(0.1, 1.0, plain.WIDTH))
    with pipeline(loss_fn, "1f1b", 2, ranks=1) as pipe:
        found = pipe.step(*plain.batch(0, 8)).losses
    torch.testing.assert_close(found, plain.step(plain.model(4), loss_fn, *plain.batch(0, 8), 4)[0])
    return f"{caught.value} | {changed.value}"


def test_replicas_refuse_what_the_loss_trains_or_changes_and_take_constants(processes: LocalProcesses):
    for text in processes.run(2, refused):
        assert "has parameters to train: log;" in text
        assert "the loss function changes its buffer loss_fn.centre" in text


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("schedule", COPIED)
def test_buffers_that_the_loss_changes_are_refused_there(schedule: str, in_place: bool):
    with pipeline(Centred(in_place), schedule) as pipe:
        for _ in range(2):
            with pytest.raises(StageError, match=r"the loss function changes its buffer loss_fn\.centre"):
                pipe.step(*plain.batch(0, 8))


@pytest.mark.parametrize("schedule", COPIED)
def test_a_loss_whose_state_is_constant_works_over_copies(schedule: str):
    loss_fn = Weighted()
    with pipeline(loss_fn, schedule) as pipe:
        found = pipe.step(*plain.batch(0, 8)).losses
    torch.testing.assert_close(found, plain.step(plain.model(4), loss_fn, *plain.batch(0, 8), 4)[0])


@pytest.mark.parametrize("loss_fn", [Temperature(), Centred(True)])
def test_without_copies_the_loss_may_have_state(loss_fn: nn.Module):
    other = copy.deepcopy(loss_fn)
    with pipeline(loss_fn, "1f1b") as pipe:
        found = pipe.step(*plain.batch(0, 8)).losses
    assert torch.equal(found, plain.step(plain.model(4), other, *plain.batch(0, 8), 4)[0])
    for one, two in zip(loss_fn.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    assert all(torch.equal(a, b) for a, b in zip(loss_fn.buffers(), other.buffers(), strict=True))
