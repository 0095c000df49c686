"""The user's model stays the user's model: tied weights are one parameter before and after every call of a pipeline."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock import Pipeline
from penstock.base.errors import StageError
from tests.support import plain
from tests.support.read_again import SecondToken, batch, loss_of, made

MICROBATCHES = 4


def optimizer_of(module: nn.Module | Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def plain_steps(model: nn.Module, count: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or optimizer_of(model)
    for _ in range(count):
        plain.step(model, loss_of, *batch(), MICROBATCHES)
        optimizer.step()
        optimizer.zero_grad()


def piped_steps(model: SecondToken, count: int, optimizer: torch.optim.Optimizer | None = None) -> Pipeline:
    """Train by a pipeline that stays open."""
    pipe = Pipeline(model, loss_of, ranks=2, microbatches=MICROBATCHES)
    assert model.head.weight is model.embedding.weight
    optimizer = optimizer or optimizer_of(pipe)
    for _ in range(count):
        pipe.step(*batch())
        assert model.head.weight is model.embedding.weight
        pipe.evaluate(*batch())
        assert model.head.weight is model.embedding.weight
        optimizer.step()
        optimizer.zero_grad()
    return pipe


def assert_close(one: nn.Module, other: nn.Module) -> None:
    # Gradients of a tied weight are added in another order than in plain PyTorch.
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("again", ["a pipeline", "plain PyTorch"])
def test_a_model_trains_further_while_its_pipeline_is_open(again: str):
    model, reference = made(), made()
    first = piped_steps(model, 2)
    plain_steps(reference, 2)
    second = piped_steps(model, 2) if again == "a pipeline" else plain_steps(model, 2)
    plain_steps(reference, 2)
    assert_close(model, reference)
    del first, second


def test_an_error_in_a_step_leaves_the_weights_tied():
    model = made()
    pipe = Pipeline(model, loss_of, ranks=2, microbatches=MICROBATCHES)
    x, y = batch()
    with pytest.raises(StageError):
        pipe.step(x + 1000, y)
    assert model.head.weight is model.embedding.weight


def test_names_and_order_of_parameters_are_the_models_own():
    model = made()
    own = [(name, id(p)) for name, p in model.named_parameters()]
    with Pipeline(model, loss_of, ranks=2, microbatches=MICROBATCHES) as pipe:
        assert own[0][0] == "head.weight"
        assert [(name, id(p)) for name, p in pipe.named_parameters()] == own
        pipe.step(*batch())
        assert [(name, id(p)) for name, p in model.named_parameters()] == own
        assert [name for name in pipe.state_dict() if name == "embedding.weight"] == []


def test_the_state_of_a_plain_optimizer_continues_in_a_pipeline():
    model, reference = made(), made()
    before = optimizer_of(reference)
    plain_steps(reference, 2, before)
    model.load_state_dict(reference.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    piped_steps(model, 2, optimizer)
    plain_steps(reference, 2, before)
    assert_close(model, reference)


def test_a_module_that_two_ranks_use_is_one_between_steps_and_its_buffers_reach_both():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x)) * self.scale

    torch.manual_seed(0)
    shared = Scaled()
    model = nn.Sequential(nn.Sequential(shared), nn.Linear(6, 6), nn.Sequential(shared), nn.Linear(6, 6))
    reference = copy.deepcopy(model)
    x, y = torch.randn(2, 8, 6).unbind()
    with Pipeline(model, F.mse_loss, ranks=2, microbatches=2) as pipe:
        pipe.step(x, y)
        assert model[0][0] is model[2][0] is shared
        pipe.zero_grad()
        for one in (shared, reference[0][0]):
            one.scale.mul_(3)
        loss = pipe.step(x, y).loss
    assert model[0][0] is model[2][0] is shared
    torch.testing.assert_close(loss, plain.step(reference, F.mse_loss, x, y, 2)[0].mean())
    plain.require_equal_gradients(model, reference, exactly=False)
