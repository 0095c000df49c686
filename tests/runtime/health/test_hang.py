"""A rank that hangs is found, named and shown, and keeps nobody waiting for longer than the limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from penstock.base.errors import HangError, StageError, WaitTimeoutError
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from tests.support import plain
from tests.support.boom import Boom


class Stuck(nn.Module):
    """Waits until it is let go, in one of its forwards."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at, self.seen, self.go = at, -1, threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.seen == self.at:
            assert self.go.wait(60), "nobody let it go"
        return x


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """What torch imports in a first step takes longer than the limits here."""
    with Pipeline(plain.model(2), nn.functional.mse_loss, ranks=2, microbatches=2) as pipe:
        pipe.step(*plain.batch(0, 4))


@pytest.fixture
def stuck() -> Iterator[list[Stuck]]:
    """One for each of two ranks; let go in the end, so that no rank stays at work."""
    both = [Stuck(), Stuck()]
    yield both
    for one in both:
        one.go.set()


def pipeline(stuck: dict[int, nn.Module], timeout: float = 0.5, **options: object) -> Pipeline:
    net = plain.model(2)
    for stage, layer in stuck.items():
        net[stage].append(layer)
    execution = ExecutionOptions(first_timeout=timeout)
    options = {"timeout": timeout, "execution": execution, "microbatches": 2, **options}
    return Pipeline(net, nn.functional.mse_loss, ranks=2, **options)


def test_a_thread_that_hangs_while_another_waits_is_named_and_all_stacks_are_shown(stuck, capfd):
    with pipeline({0: stuck[0]}) as pipe, pytest.raises(HangError) as info:
        pipe.step(*plain.batch(0, 4))
    text = str(info.value)
    assert text.startswith("rank 0 is in op 0F0 (stage 0, microbatch 0) of step 1, for ")
    assert "rank 1 waited 0.5 s for a message from rank 0; it was to send the output of op 0F0" in text
    assert "(at rank 1, stage 1, microbatch 0, op 1F0 of step 1)" in text
    assert isinstance(info.value.__cause__, WaitTimeoutError)
    shown = capfd.readouterr().err
    number = next(line.split()[1] for line in shown.splitlines() if line.endswith("is penstock-rank-0"))
    stack = shown[shown.index(f"Thread {number}") :].split("\n\n")[0]
    assert "in forward" in stack


def test_threads_that_all_hang_are_found_though_none_waits(stuck, capfd):
    with pipeline({0: stuck[0], 1: stuck[1]}) as pipe:
        stuck[0].at = 1
        with pytest.raises(HangError, match=r"which is longer than the timeout of 0\.5 s") as info:
            pipe.step(*plain.batch(0, 4))
    assert "rank 0 is in op 0F1 (stage 0, microbatch 1) of step 1" in str(info.value)
    assert "rank 1 is in op 1F0 (stage 1, microbatch 0) of step 1" in str(info.value)
    assert "is penstock-rank-1" in capfd.readouterr().err


def test_after_a_hang_the_next_step_is_refused_until_the_thread_is_free(stuck):
    with pipeline({0: stuck[0]}) as pipe:
        for message in ("rank 0 is in op 0F0", "the thread of rank 0 is still at work on an earlier step"):
            with pytest.raises(HangError, match=message):
                pipe.step(*plain.batch(0, 4))
        stuck[0].go.set()
        while True:
            try:
                losses = pipe.step(*plain.batch(1, 4)).losses
                break
            except WaitTimeoutError:  # HangError is one
                continue
    expected, _ = plain.step(plain.model(2), nn.functional.mse_loss, *plain.batch(1, 4), 2)
    assert torch.equal(losses, expected)


def test_an_error_does_not_wait_for_a_thread_that_is_still_at_work(stuck):
    stuck[0].at = 1
    with pipeline({0: stuck[0], 1: Boom(0)}) as pipe:
        with pytest.raises(StageError, match=r"rank 1, stage 1, microbatch 0.*boom") as info:
            pipe.step(*plain.batch(0, 4))
        assert any("rank 0 is in op 0F1" in note and "left behind" in note for note in info.value.__notes__)
        stuck[0].go.set()
        pipe.step(*plain.batch(1, 4))


def test_the_first_steps_have_a_limit_of_their_own(stuck):
    stuck[1].go.set()
    with pipeline({0: stuck[0]}, timeout=0.2, execution=ExecutionOptions(first_timeout=60)) as pipe:
        timer = threading.Timer(0.6, stuck[0].go.set)  # three times the limit of later steps
        timer.start()
        pipe.step(*plain.batch(0, 4))
        timer.join()
        stuck[0].go.clear()
        stuck[0].at = stuck[0].seen + 1
        with pytest.raises(HangError, match="step 2"):
            pipe.step(*plain.batch(1, 4))


def test_a_rank_that_is_slow_but_lives_raises_no_alarm():
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            threading.Event().wait(0.3)  # the whole step takes longer than the limit, no op does
            return x

    with pipeline({1: Slow()}, timeout=2.5, microbatches=10) as pipe:
        pipe.step(*plain.batch(0, 20))
