"""Losses without a graph, which train nothing, and losses with parameters or buffers: refused, or as in plain PyTorch."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from penstock.base.errors import ConfigError, StageError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ExecutionOptions, ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.groups import outcome, run_cases


def detached(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mse_loss(output.detach(), target)


def without_grad(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return mse_loss(output, target)


UNCHECKED = ExecutionOptions(check_split=False)
"""The losses below differ by the number of a microbatch, so two as one have another one."""


class Constant:
    """A loss that is constant in some microbatches, told by their targets' first number."""

    def __init__(self, constant: list[int]) -> None:
        self.constant = constant

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if int(target[0, 0]) in self.constant:
            return torch.zeros(())
        return mse_loss(output, target)


def numbered(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = plain.batch(0, 2 * microbatches)
    y[:, 0] = torch.arange(microbatches).repeat_interleave(2)
    return x, y


class Cut(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


def head_frozen_behind_a_cut() -> nn.Sequential:
    net = plain.model(4)
    net[2].append(Cut())
    return net[:3].append(net[3].requires_grad_(False))


# Losses cut from the graph in both ways, with and without the look at their values, one rank and two.
@pytest.mark.parametrize(
    ("loss", "check_finite", "family", "ranks"),
    [(detached, True, "zb-h1", 2), (detached, False, "1f1b", 1), (without_grad, True, "1f1b", 2)],
)
def test_a_loss_without_a_graph_is_refused_and_the_next_step_is_sound(loss, check_finite, family, ranks):
    net, cut = plain.model(4), True

    def sometimes(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(output, target) if cut else mse_loss(output, target)

    execution = ExecutionOptions(check_finite=check_finite)
    with Pipeline(net, sometimes, microbatches=4, ranks=ranks, schedule=family, execution=execution) as pipe:
        with pytest.raises(StageError, match="no microbatch's loss has a graph"):
            pipe.step(*plain.batch(0, 8))
        assert pipe.steps == 0
        assert all(p.grad is None for p in net.parameters())
        cut = False
        losses = pipe.step(*plain.batch(0, 8)).losses
    other = plain.model(4)
    assert torch.equal(losses, plain.step(other, mse_loss, *plain.batch(0, 8), 4)[0])
    plain.require_equal_gradients(net, other)


def refused(rank: int, where: str) -> list[str]:
    net = head_frozen_behind_a_cut() if where == "layer" else plain.model(4)
    loss = detached if where == "loss" else mse_loss
    with Pipeline(net, loss, microbatches=4, ranks=2, split=[3, 1], timeout=300) as pipe:
        texts = [outcome(pipe.step, *plain.batch(0, 8)) for _ in range(2)]
        assert pipe.steps == 0
        return texts


def test_every_process_says_the_same_also_where_only_another_rank_has_something_to_train(
    processes: LocalProcesses,
):
    places = ("loss", "layer")
    for where, told in zip(places, run_cases(processes, 2, refused, [(p,) for p in places]), strict=True):
        for texts in (*told, refused(0, where)):
            for n, text in enumerate(texts, 1):
                assert text.startswith(f"StageError: step {n}: no microbatch's loss has a graph (")


def test_losses_without_a_graph_in_some_microbatches_are_not_refused():
    x, y = numbered(4)
    net, other = plain.model(4), plain.model(4)
    with Pipeline(net, Constant([0, 2, 3]), microbatches=4, ranks=2, execution=UNCHECKED) as pipe:
        pipe.step(x, y)
    (mse_loss(other(x[2:4]), y[2:4]) / 4).backward()
    plain.require_equal_gradients(net, other)


REPLICAS = {
    "microbatches": 2, "mesh": MeshShape(pp=1, dp=2), "timeout": 300, "execution": UNCHECKED,
}  # fmt: skip
COUNTS = {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0}


def of_processes(rank: int, constant: list[int], counts: bool) -> str:
    options = {"reduction": lambda target: COUNTS[int(target[0, 0])]} if counts else {}
    with Pipeline(plain.model(2), Constant(constant), **REPLICAS, **options) as pipe:
        text = outcome(pipe.step, *numbered(4))
        assert all((p.grad is not None) == (text == "ok") for p in pipe.parameters())
        return text.partition(" (")[0]


def test_of_two_replicas_one_may_be_without_a_graph_also_where_the_other_counts_nothing(
    processes: LocalProcesses,
):
    cases = [([0, 1], False), ([0, 1], True), ([0, 1, 2, 3], False)]
    one, counted, none = run_cases(processes, 2, of_processes, cases)
    assert one == counted == ["ok"] * 2
    assert none == ["StageError: step 1: no microbatch's loss has a graph"] * 2


def test_a_model_that_is_frozen_as_a_whole_may_take_a_step():
    net = plain.model(4).requires_grad_(False)
    with Pipeline(net, mse_loss, microbatches=4, ranks=2) as pipe:
        losses = pipe.step(*plain.batch(0, 8)).losses
    assert torch.equal(losses, plain.train(4, 4, steps=1)[0][0])


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (lambda output, target: (output > target).sum(), "a int64 tensor"),
        (lambda output, target: {"right": (output > target).any()}, "a bool tensor.*for 'right'"),
        (lambda output, target: (output - target).sum().to(torch.complex64), "a complex64 tensor"),
    ],
)
def test_a_loss_of_another_dtype_is_refused_by_name(loss, given):
    text = f"StageError: .*real floating-point dtype.*returned {given}"
    with Pipeline(plain.model(2), loss, microbatches=2, ranks=2) as pipe:
        assert re.match(text, outcome(pipe.step, *plain.batch(0, 4)))


COPIED = ["dualpipe", "chimera"]


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.5))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output * self.log.exp(), target)


class Centred(nn.Module):
    """Keeps a running mean of the outputs, in place or as a new tensor each time."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("centre", torch.zeros(plain.WIDTH))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        if self.in_place:
            self.centre.copy_(centre)
        else:
            self.centre = centre
        return mse_loss(output - centre, target)


class Weighted(nn.Module):
    """Has a constant, as a cross entropy with weights has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(plain.WIDTH))
        self.fixed = nn.Parameter(torch.ones(plain.WIDTH), requires_grad=False)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target).square() * self.weight * self.fixed).mean()


def pipeline(loss_fn: nn.Module, schedule: str, dp: int = 1, ranks: int = 2, shard: str = "none") -> Pipeline:
    options = {"mesh": MeshShape(ranks, dp), "parallel": ParallelOptions(shard=shard)}
    return Pipeline(plain.model(4), loss_fn, microbatches=4 // dp, schedule=schedule, **options)


@pytest.mark.parametrize("schedule", COPIED)
def test_parameters_of_the_loss_are_refused_where_the_last_stage_has_copies(schedule: str):
    with pytest.raises(ConfigError, match=r"loss_fn \(Temperature\) has parameters to train: log;"):
        pipeline(Temperature(), schedule)


def refused_of_replicas(rank: int) -> tuple[str, list[str]]:
    trains = outcome(pipeline, Temperature(), "1f1b", 2, ranks=1)
    changes = []
    for shard in ("none", "optimizer", "gradients", "weights"):
        with pipeline(Centred(True), "1f1b", 2, ranks=1, shard=shard) as pipe:
            PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
            changes.append(outcome(pipe.step, *plain.batch(0, 8)))
    loss_fn = Weighted()
    with torch.no_grad():
        loss_fn.weight.copy_(torch.linspace(0.1, 1.0, plain.WIDTH))
    with pipeline(loss_fn, "1f1b", 2, ranks=1) as pipe:
        found = pipe.step(*plain.batch(0, 8)).losses
    torch.testing.assert_close(found, plain.step(plain.model(4), loss_fn, *plain.batch(0, 8), 4)[0])
    return trains, changes


def test_replicas_refuse_what_the_loss_trains_or_changes_and_take_constants(processes: LocalProcesses):
    for trains, changes in processes.run(2, refused_of_replicas):
        assert re.match("ConfigError: .*has parameters to train: log;", trains)
        for text in changes:
            assert re.match("StageError: .*the loss function changes its buffer loss_fn.centre", text)


@pytest.mark.parametrize(
    ("schedule", "in_place"), [("dualpipe", True), ("dualpipe", False), ("chimera", True)]
)
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
