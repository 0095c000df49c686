"""Signals that ask a run to stop: the first makes it save after its step, one that comes later ends it at once.

systemd, Slurm and other supervisors send a signal to every process they started, and a launcher passes on its own copy: one
request, which reaches a process twice. So a repeat within `SAME_REQUEST` seconds changes nothing.

Before the first step there is nothing to save, and what a process waits for then may be a long time coming: the first signal
ends it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from threading import Event, Thread
from types import TracebackType
from typing import Any, NoReturn, Self

from penstock.launch.exit_codes import ExitCode, of_signal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGHUP: a terminal or ssh session was closed. SIGUSR1: Slurm's ``--signal=USR1@120``, 120 s before the time is up."""

SAME_REQUEST = 2.0
"""Seconds within which a further signal is a copy of the first."""

_SHOW_CURSOR = b"\x1b[?25h"


class Interrupts:
    """Takes `SIGNALS` within its block, in the main thread; afterwards the handlers are those from before.

    A SIGHUP that is ignored when the block begins stays ignored: that is what ``nohup`` is for.

    Signals are read by a thread of their own: the main thread may be inside a wait that runs no Python for long, and the
    second signal must end the process even then.

    Args:
        tells: whether this process says on stderr what a signal does; one of a run's is enough.
    """

    def __init__(self, tells: bool) -> None:
        self._tells = tells
        self._asked = Event()
        self._begun = False
        self._first = 0.0  # when the first signal came

    def asked(self) -> bool:
        """Whether a signal has asked this process to stop; whoever asks for the first time takes care of it from now on."""
        self._begun = True
        return self._asked.is_set()

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = Thread(target=self._watch, name="penstock-signals", daemon=True)
        self._thread.start()
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {
            number: signal.signal(number, _leave_to_thread)
            for number in SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _watch(self) -> None:
        while data := os.read(self._reader, 1):
            if data[0] in SIGNALS:
                self._take(signal.Signals(data[0]))

    def _take(self, number: signal.Signals) -> None:
        if not self._begun:
            self._leave(f"{number.name}: out at once; no step has been done", ExitCode.STOPPED)
        if self._asked.is_set():
            if time.monotonic() - self._first < SAME_REQUEST:
                return
            self._leave(
                f"{number.name} again: out at once; earlier checkpoints are as they were", of_signal(number)
            )
        self._first = time.monotonic()
        self._asked.set()
        later = f"{SAME_REQUEST:g} s later"
        self._tell(
            f"{number.name}: the step in hand is finished and saved; once more, {later}, ends the run at once"
        )

    def _leave(self, text: str, code: int) -> NoReturn:
        self._tell(text)
        with suppress(OSError):
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)  # the progress bar has hidden it
        os._exit(code)

    def _tell(self, text: str) -> None:
        if self._tells:
            with suppress(OSError):  # nobody reads it any more
                os.write(2, f"penstock: {text}\n".encode())


def _leave_to_thread(number: int, frame: object) -> None:
    """Only a signal that has a handler is written to the pipe."""
