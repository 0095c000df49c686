"""SIGTERM and Ctrl-C: the run is saved, and after resuming it equals one that was never stopped."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from penstock.base.errors import StoppedError
from penstock.checkpoint.find import is_whole
from penstock.train import signals
from penstock.train.signals import SIGNALS, ExitCode, Interrupts, of_signal
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, quietly, run, same
from tests.support.victim import started


class Counted(Interrupts):
    """Interrupts that record the signals they have handled, and with which words and code they would end the process."""

    def __init__(self, announce: bool) -> None:
        super().__init__(announce)
        self.numbers: list[signal.Signals] = []
        self.ended: list[tuple[str, int]] = []
        self._more = threading.Condition()

    def _quit(self, text: str, code: int) -> NoReturn:
        self.ended.append((text, code))
        raise RuntimeError

    def _handle(self, number: signal.Signals) -> None:
        with suppress(RuntimeError):
            super()._handle(number)
        with self._more:
            self.numbers.append(number)
            self._more.notify()

    def until(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.numbers) >= count, 60)


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """A SIGHUP that nobody ignores, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_handlers_are_as_before_after_the_block():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupts(announce=False) as interrupts:
        assert not interrupts.asked()
        assert all(signal.getsignal(n) != was for n, was in zip(SIGNALS, before, strict=True))
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_each_signal_asks_once_however_often_it_comes_at_that_time(number: signal.Signals):
    with Counted(announce=False) as interrupts:
        assert not interrupts.asked()
        for _ in range(3):
            os.kill(os.getpid(), number)
        interrupts.until(3)
        assert interrupts.asked()
    assert interrupts.ended == []


def test_under_nohup_a_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Counted(announce=False) as interrupts:
            assert not interrupts.asked()
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.asked()
            os.kill(os.getpid(), signal.SIGTERM)
            interrupts.until(1)
        assert (interrupts.numbers, interrupts.ended) == ([signal.SIGTERM], [])
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_the_first_step_a_signal_ends_it_and_later_the_second_one_after_a_while(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    with Counted(announce=True) as interrupts:
        os.kill(os.getpid(), number)
        interrupts.until(1)
        assert interrupts.ended == [(f"{number.name}: quitting now; no step has been done", ExitCode.STOPPED)]
        assert not interrupts.asked()
        os.kill(os.getpid(), number)
        interrupts.until(2)
        assert interrupts.asked()
        monkeypatch.setattr(signals, "SAME_REQUEST", 0.0)
        os.kill(os.getpid(), number)
        interrupts.until(3)
    again = f"{number.name} again: quitting now; earlier checkpoints are unchanged"
    assert interrupts.ended[1:] == [(again, 128 + number)]
    first = "finishing this step and saving; signal again after 2 s to quit now"
    assert capfd.readouterr().err == f"penstock: {number.name}: {first}\n"


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on_from_there(tmp_path: Path):
    text = text_folder(tmp_path)
    once = config_of(tmp_path, text, "once", 4, runtime={"threads": 1}, train={"checkpoint_every": 0})
    run(once)
    config = config_of(tmp_path, text, "stopped", 4, runtime={"threads": 1}, train={"checkpoint_every": 0})
    done = started(config, "0:0:1:term_self")
    folder = tmp_path / "runs" / "stopped"
    saved = folder / "checkpoints" / "step-00000002"
    assert done.returncode == ExitCode.STOPPED, done.stderr
    first = "penstock: SIGTERM: finishing this step and saving; signal again after 2 s to quit now\n"
    assert done.stderr == first
    assert done.stdout.endswith(
        f"stopped after step 2, saved in {saved}; resume with  penstock train --resume {folder}\n"
    )
    assert is_whole(saved)
    run(config_of(tmp_path, text, "stopped", 4, str(folder), runtime={"threads": 1}))
    same(folder, tmp_path / "runs" / "once")


@pytest.mark.slow
def test_the_second_ctrl_c_ends_it_at_once_and_checkpoints_stay(tmp_path: Path):
    config = config_of(tmp_path, text_folder(tmp_path), "twice", 4, train={"checkpoint_every": 1})
    done = started(config, "0:0:3:interrupt_twice")
    assert done.returncode == of_signal(signal.SIGINT)
    assert done.stderr.splitlines() == [
        "penstock: SIGINT: finishing this step and saving; signal again after 0 s to quit now",
        "penstock: SIGINT again: quitting now; earlier checkpoints are unchanged",
    ]
    assert is_whole(tmp_path / "runs" / "twice" / "checkpoints" / "step-00000002")


def test_a_signal_before_the_first_step_saves_nothing(tmp_path: Path):
    config = config_of(tmp_path, text_folder(tmp_path), "early", 4)
    said = "stopped before the first step, so there is nothing to save; resume with"
    with pytest.raises(StoppedError, match=said):
        quietly(config, stopping=lambda: True)
    assert not (tmp_path / "runs" / "early" / "checkpoints").exists()
