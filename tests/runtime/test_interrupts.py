"""A step that the caller interrupts: no rank adds to gradients afterwards. And what ranks see of the caller's context."""

from __future__ import annotations

import contextvars
import copy
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from penstock.base.errors import PenstockError
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers import rank_threads
from tests.support import plain


class Interrupting(nn.Module):
    """Interrupts the main thread from its backward, and goes on once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.interrupted = threading.Event(), threading.Semaphore(0)
        self.times, self.patience = 0, 60.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        x.register_hook(self.hold)
        return x

    def hold(self, grad: torch.Tensor) -> None:
        times, self.times = self.times, 0
        for _ in range(times):
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGINT)
            self.interrupted.acquire(timeout=60)
        if times:
            self.go.wait(self.patience)


@pytest.fixture
def layer() -> Iterator[Interrupting]:
    found = Interrupting()

    def interrupt(number: int, frame: object) -> None:
        found.interrupted.release()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    yield found
    found.go.set()
    signal.signal(signal.SIGINT, before)


UNCHECKED = ExecutionOptions(check_split=False)
"""The layer cannot be evaluated, so two microbatches as one cannot be compared in the first step."""


def model(layer: nn.Module) -> nn.Sequential:
    net = plain.model(2)
    net[0].append(layer)
    return net


def require_plain_gradients(net: nn.Sequential) -> None:
    reference = plain.model(2)
    plain.step(reference, mse_loss, *plain.batch(1, 4), 2)
    plain.require_equal_gradients(net, reference)


def test_an_interrupted_step_returns_when_no_rank_computes_any_more(layer: Interrupting):
    net = model(layer)
    with Pipeline(net, mse_loss, ranks=2, microbatches=2, execution=UNCHECKED) as pipe:
        pipe.step(*plain.batch(0, 4))
        layer.times, layer.patience = 1, 0.5  # it is not let go before the step has returned
        with pytest.raises(KeyboardInterrupt):
            pipe.step(*plain.batch(0, 4))
        net.zero_grad()
        layer.go.set()
        pipe.step(*plain.batch(1, 4))
    require_plain_gradients(net)


@pytest.mark.parametrize("interrupts", [1, 2])
def test_gradients_that_a_rank_adds_after_an_interrupted_step_are_refused(
    layer: Interrupting, interrupts: int, monkeypatch: pytest.MonkeyPatch
):
    if interrupts == 1:
        monkeypatch.setattr(rank_threads, "GRACE", 0.1)
    net = model(layer)
    with Pipeline(net, mse_loss, ranks=2, microbatches=2, execution=UNCHECKED) as pipe:
        pipe.step(*plain.batch(0, 4))
        layer.times = interrupts
        with pytest.raises(KeyboardInterrupt) as info:
            pipe.step(*plain.batch(0, 4))
        if interrupts == 1:
            assert "rank 0 is in op 0B0" in info.value.__notes__[0]
            assert "did not stop within 0.1 s of the interrupt" in info.value.__notes__[0]
        net.zero_grad()
        layer.go.set()
        with pytest.raises(PenstockError, match=r"rank 0(, 1)? was still in the backward"):
            pipe.step(*plain.batch(1, 4))
        net.zero_grad()
        pipe.step(*plain.batch(1, 4))
    require_plain_gradients(net)


SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE", default=1.0)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE.get()


def test_ranks_see_the_context_variables_of_the_caller_as_they_are_in_each_step():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(plain.WIDTH, plain.WIDTH), Scaled()) for _ in range(2)])
    reference = copy.deepcopy(net)
    x, y = plain.batch(0, 4)
    with Pipeline(net, mse_loss, ranks=2, microbatches=4) as pipe:
        for scale in (3.0, 0.5):
            token = SCALE.set(scale)
            found = [pipe.step(x, y).losses, pipe.evaluate(x, y).losses]
            losses, _ = plain.step(reference, mse_loss, x, y, 4)
            assert all(torch.equal(one, losses) for one in found)
            assert pipe.on_ranks(lambda rank: SCALE.get()) == [scale, scale]
            SCALE.reset(token)
