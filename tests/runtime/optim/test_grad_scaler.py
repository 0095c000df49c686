"""The scale follows torch's rules, and all ranks agree on it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from penstock.base.errors import ConfigError
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain

INF = float("inf")


@pytest.mark.parametrize(
    "given",
    [
        {"growth_interval": 2},
        {"init_scale": 3.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3},
        {"init_scale": 2.0**126, "growth_interval": 1},
    ],
)
def test_the_scale_goes_as_that_of_torch(given):
    ours, theirs = GradScaler(**given), torch.amp.GradScaler("cpu", **given)
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    random.seed(0)
    for _ in range(60):
        finite = random.random() < 0.8
        theirs.scale(parameter.sum())
        parameter.grad = torch.full((3,), 1.0 if finite else INF)
        theirs.step(optimizer)
        theirs.update()
        ours.update(finite)
        assert ours.state_dict() == theirs.state_dict()
    again = GradScaler()
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == ours.state_dict()


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def an_inf_on_the_last_rank(rank: int):
    """The last rank's layer gets an infinite gradient; nothing of it reaches the first rank's."""
    torch.set_num_threads(1)
    with Pipeline(
        [plain.model(1)[0], Stop(), OnlyHere(), plain.model(1)[0]],
        mean_square,
        microbatches=2,
        ranks=2,
        execution=ExecutionOptions(check_split=False),
    ) as pipe:
        before = {n: p.detach().clone() for n, p in pipe.named_parameters()}
        scaler = GradScaler(init_scale=8.0)
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=1.0, scaler=scaler)
        pipe.step(*plain.batch(0, 4))
        own = all(p.grad is None or bool(p.grad.isfinite().all()) for p in pipe.parameters())
        done = optimizer.step()
        same = all(torch.equal(p, before[n]) for n, p in pipe.named_parameters())
        return own, done.applied, done.skipped, same, scaler.scale, optimizer.skipped


class Stop(nn.Module):
    """Lets no gradient through but zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.0


class OnlyHere(nn.Module):
    """A weight whose gradient is infinite, while its input's is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.clone()
        weight.register_hook(lambda grad: grad * 0 + INF)
        return x + weight


def test_an_inf_on_one_rank_skips_the_update_on_all_of_them(processes: LocalProcesses):
    first, last = processes.run(2, an_inf_on_the_last_rank)
    assert first == (True, False, True, True, 4.0, 1)
    assert last == an_inf_on_the_last_rank(0) == (False, False, True, True, 4.0, 1)


def test_a_loop_of_ones_own_unscales_and_updates():
    net, other = plain.model(4), plain.model(4)
    x, y = plain.batch(0, 8)
    plain.step(other, nn.functional.mse_loss, x, y, 4)
    with Pipeline(net, nn.functional.mse_loss, microbatches=4, ranks=2) as pipe:
        pipe.scaler = scaler = GradScaler(init_scale=1024.0, growth_interval=1)
        pipe.step(x, y)
        assert scaler.unscale_(pipe)
        scaler.update(True)
        assert scaler.scale == 2048.0
        for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


def test_a_disabled_scaler_changes_nothing():
    scaler = GradScaler(enabled=False)
    with Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=4, ranks=2) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, scaler=scaler)
        assert pipe.scaler is None
        pipe.step(*plain.batch(0, 8))
        assert optimizer.step().applied
        assert scaler.unscale_(pipe)
    scaler.update(False)
    scaler.load_state_dict({})
    assert scaler.state_dict() == {}
    assert scaler.scale == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"init_scale": 0.0}, "init_scale must be a positive float32 number, got 0.0"),
        ({"init_scale": 1e39}, "init_scale must be a positive float32 number"),
        ({"growth_factor": 1.0}, "growth_factor must be a number above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must be a number between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval must be a whole number of at least 1"),
        ({"growth_interval": "often"}, "growth_interval must be a whole number of at least 1, got 'often'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        GradScaler(**given)


def test_a_state_that_does_not_fit_is_refused_whole():
    scaler = GradScaler()
    before = scaler.state_dict()
    with pytest.raises(ConfigError, match="growth_factor is missing; backoff_factor is missing"):
        scaler.load_state_dict({"scale": 2.0})
    with pytest.raises(
        ConfigError, match="scale must be a positive float32 number, got nan; growth_interval must be"
    ):
        scaler.load_state_dict({**before, "scale": float("nan"), "growth_interval": 0})
    assert scaler.state_dict() == before


def test_gradients_kept_in_float16_are_refused():
    with (
        Pipeline(plain.model(4).half(), mean_square, microbatches=4, ranks=2) as pipe,
        pytest.raises(
            ConfigError, match=r"0\.0\.weight, 0\.0\.bias, 0\.1\.weight and others: unscaling gradients kept"
        ),
    ):
        PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, scaler=GradScaler())


def test_float16_autocast_is_scaled_as_torch_would():
    net, other = plain.model(4), plain.model(4)
    reference = torch.optim.AdamW(other.parameters(), lr=0.01)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    scaler, skips = GradScaler(init_scale=2.0**24, growth_interval=2), []
    with Pipeline(net, nn.functional.mse_loss, microbatches=4, ranks=2, autocast=torch.float16) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, scaler=scaler)
        for n in range(12):
            x, y = plain.batch(n, 8)
            pipe.step(x, y)
            skips.append(optimizer.step().skipped)
            for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.mse_loss(other(a), b)
                theirs.scale(loss / 4).backward()
            theirs.step(reference)
            theirs.update()
            reference.zero_grad()
            assert scaler.scale == theirs.get_scale()
    assert 0 < sum(skips) < 12
    for ours, their in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, their)
