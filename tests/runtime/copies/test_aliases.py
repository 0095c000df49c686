"""What is changed of a parameter between two steps holds for its copies in other threads, or is refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.base.errors import ConfigError, PenstockError, ReplicaError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.lanes import exhaustive

WIDTH, M = plain.WIDTH, 4
COPIED = ["dualpipe", *exhaustive("chimera")]
"""Schedules with copies of every stage."""


def model(kind: str = "plain") -> nn.Sequential:
    net = plain.model(4)
    if kind == "tied":
        net[3][0].weight = net[0][0].weight
    if kind == "buffer":
        net[1][0].register_buffer("scale", 0.5 * torch.eye(WIDTH), persistent=False)
        net[1][0].register_forward_hook(lambda module, _, value: value @ module.scale)
    return net


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x, y = plain.batch(step, 2 * M)
    return x.to(dtype), y.to(dtype)


def pipeline(net: nn.Module, schedule: str, dp: int = 1) -> Pipeline:
    mesh = MeshShape(2, dp, 1)
    return Pipeline(net, F.mse_loss, microbatches=M // dp, schedule=schedule, mesh=mesh, timeout=300)


def compare(pipe: Pipeline, reference: nn.Module, x: Tensor, y: Tensor) -> None:
    """A step of both has the same gradients, and None for the same weights."""
    pipe.step(x, y)
    plain.step(reference, F.mse_loss, x, y, M)
    found = {name: p.grad for name, p in pipe.named_parameters()}
    for name, p in reference.named_parameters():
        if name in found:
            assert (found[name] is None) == (p.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(found[name], p.grad, msg=lambda text, n=name: f"{n}: {text}")


def double(net: nn.Module, step: int) -> None:
    if step == 2:
        net.double()
    if step == 4:
        net.float()


def rebound(net: nn.Module, step: int) -> None:
    """As an optimizer does that makes new weights in place of changing them."""
    for p in net.parameters():
        p.data = p.data * 0.9 + 0.01


def scaled(net: nn.Module, step: int) -> None:
    """A buffer that is not persistent, changed between steps: in place, and as a whole."""
    if hasattr(net[1][0], "scale"):
        net[1][0].scale.mul_(1.5)
        if step % 2:
            net[1][0].scale = net[1][0].scale + 0.1


@pytest.mark.parametrize(
    ("kind", "schedule", "change", "zeroed"),
    [
        ("tied", "dualpipe", double, False),
        ("plain", "dualpipe", rebound, True),
        ("buffer", "chimera", scaled, False),
        *exhaustive(
            ("plain", "chimera", double, True),
            ("tied", "chimera", rebound, False),
            ("buffer", "dualpipe", double, True),
            ("buffer", "dualpipe", scaled, True),
        ),
    ],
)
def test_copies_follow_other_data_of_a_parameter(kind, schedule, change, zeroed):
    net, reference = model(kind), model(kind)
    with pipeline(net, schedule) as pipe:
        for step in range(6):
            change(net, step)
            change(reference, step)
            x, y = batch(step, next(net.parameters()).dtype)
            compare(pipe, reference, x, y)
            loss = pipe.evaluate(x, y).loss
            torch.testing.assert_close(loss, F.mse_loss(reference(x), y))
            if zeroed:
                net.zero_grad()
                reference.zero_grad()


@pytest.mark.parametrize("schedule", COPIED)
def test_hooks_registered_and_removed_between_steps_work_on_copies(schedule: str):
    net, reference = model(), model()
    with pipeline(net, schedule) as pipe:
        handles = []
        for step in range(4):
            for one in (net, reference):
                if step in (1, 2):
                    # Not linear: the hook must see the gradient of each microbatch, as it does in plain PyTorch.
                    handles.append(one[1][0].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3) * 2))
            if step == 3:
                [handle.remove() for handle in handles]
            compare(pipe, reference, *batch(step))


@pytest.mark.parametrize("schedule", COPIED)
def test_a_weight_with_a_hook_may_be_frozen_and_thawed(schedule: str):
    net, reference = model(), model()
    for one in (net, reference):
        one[1][0].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3) * 2)
        one[1][0].weight.requires_grad_(False)
    with pipeline(net, schedule) as pipe:
        for step in range(3):
            for one in (net, reference):
                one[1][0].weight.requires_grad_(step != 0)
            compare(pipe, reference, *batch(step))
            assert (net[1][0].weight.grad is None) == (step == 0)


def test_copies_that_were_given_different_data_are_refused_by_name():
    x, y = batch(0, torch.float32)
    with pipeline(model(), "dualpipe") as pipe:
        pipe.step(x, y)
        named = [pair for module in pipe.stage_modules() for pair in module.whole_model_parameters()]
        one, other = [p for name, p in named if name == "0.0.weight"]
        one.data = torch.ones(WIDTH, WIDTH)
        other.data = torch.zeros(WIDTH, WIDTH)
        with pytest.raises(ReplicaError, match=r"'0\.0\.weight' has several copies in this process"):
            pipe.step(x, y)
        other.data = one.data
        pipe.step(x, y)
        assert pipe.steps == 2


def test_weights_that_share_memory_and_are_two_for_the_user_stay_two():
    net = model()
    net[3][0].weight.data = net[0][0].weight.data  # not tied: each has a gradient, and a flag, of its own
    net[3][0].weight.requires_grad_(False)
    x, y = batch(0)
    with pipeline(net, "dualpipe") as pipe:
        pipe.step(x, y)
        assert net[0][0].weight.grad is not None
        assert net[3][0].weight.grad is None


def test_a_late_hook_registered_between_steps_is_refused_on_copies():
    net = model()
    x, y = batch(0)
    with pipeline(net, "dualpipe") as pipe:
        pipe.step(x, y)
        net[1][0].weight.register_post_accumulate_grad_hook(lambda p: None)
        with pytest.raises(ConfigError, match=r"1\.0\.weight has a hook that runs after"):
            pipe.step(x, y)
        assert pipe.steps == 1


def replaced(rank: int) -> tuple[str, int]:
    net = model()
    x, y = batch(0)
    with pipeline(net, "1f1b", 2) as pipe:
        pipe.step(x, y)
        net[1][0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        with pytest.raises(PenstockError) as caught:
            pipe.step(x, y)
        with pytest.raises(PenstockError):
            pipe.step(x, y)
        return str(caught.value), pipe.steps


@pytest.mark.slow
def test_replaced_parts_are_refused_in_processes(processes: LocalProcesses):
    for text, steps in processes.run(4, replaced):
        assert re.search(r"1\.0\.weight .*the pipeline was built", text)
        assert steps == 1


def hooked(rank: int, before: bool, schedule: str) -> str:
    net = model("tied")
    if before:
        net[0][0].weight.register_hook(torch.sign)
    x, y = batch(0)
    with pipeline(net, schedule) as pipe:
        if not before:
            pipe.step(x, y)
            net[0][0].weight.register_hook(torch.sign)
        with pytest.raises(PenstockError) as caught:
            pipe.step(x, y)
        return str(caught.value)


@pytest.mark.parametrize(("before", "schedule"), [(True, "1f1b"), (False, "dualpipe"), (False, "1f1b")])
def test_hooks_of_a_weight_tied_over_stages_are_refused_by_name(before: bool, schedule: str):
    assert "0.0.weight is tied over several stages and has a hook" in hooked(0, before, schedule)


def test_hooks_of_tied_weights_are_refused_in_processes(processes: LocalProcesses):
    for text in processes.run(2, hooked, True, "1f1b"):
        assert "is tied over several stages and has a hook" in text
