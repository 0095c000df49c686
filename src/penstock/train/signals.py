"""Signals and exit codes of ``penstock train``.

The first signal makes a run save after its step, a later one ends it at once. systemd, Slurm and other supervisors send a
signal to every process they started, and a launcher passes on its own copy, so one request reaches a process twice. A
repeat within `SAME_REQUEST` seconds therefore changes nothing. Before the first step there is nothing to save, and a
process may have to wait long for that step: the first signal ends it.

Exit codes are for scripts and schedulers. A process that a second signal ends at once has the shell's code for that signal:
130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP, 138 for SIGUSR1.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from enum import IntEnum
from threading import Event, Thread
from types import TracebackType
from typing import Any, NoReturn, Self


class ExitCode(IntEnum):
    """Exit codes that Penstock chooses itself."""

    DONE = 0
    FAILED = 1
    """The run failed, or one of its processes was killed."""
    BAD_INPUT = 2
    """No run was begun, and nothing was written."""
    NOT_FINITE = 3
    """Losses or gradients were NaN or infinite more often in a row than allowed; a restart would repeat the same steps."""
    STOPPED = 75
    """A signal stopped the run and its state is saved. EX_TEMPFAIL of ``sysexits.h``: try again."""
    HUNG = 124
    """A rank hung and was ended, as by ``timeout(1)``."""


def of_signal(number: int) -> int:
    """Return the exit code that a shell reports for a process ended by a signal."""
    return 128 + number


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGHUP: a terminal or ssh session was closed. SIGUSR1: Slurm's ``--signal=USR1@120``, 120 s before the time is up."""

SAME_REQUEST = 2.0
"""Seconds within which another signal counts as a copy of the first."""

_SHOW_CURSOR = b"\x1b[?25h"


class Interrupts:
    """Context manager that turns `SIGNALS` into requests to stop, in the main thread; it restores the handlers at its end.

    A SIGHUP that is ignored when the block begins stays ignored, as ``nohup`` wants it.

    A separate thread reads the signals: the main thread may wait for long in code that runs no Python, and the second signal
    must end the process even then.
    """

    def __init__(self, announce: bool) -> None:
        self._announce = announce
        self._requested = Event()
        self._begun = False
        self._first_at = 0.0

    def asked(self) -> bool:
        """Return whether a signal has asked this process to stop; the caller then has to save and stop."""
        self._begun = True
        return self._requested.is_set()

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        # `set_wakeup_fd` refuses a descriptor that blocks.
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
        # The thread reads the end of the pipe and returns; only then may the other end be closed.
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _watch(self) -> None:
        while data := os.read(self._reader, 1):
            if data[0] in SIGNALS:
                self._handle(signal.Signals(data[0]))

    def _handle(self, number: signal.Signals) -> None:
        if not self._begun:
            self._quit(f"{number.name}: quitting now; no step has been done", ExitCode.STOPPED)
        if self._requested.is_set():
            if time.monotonic() - self._first_at < SAME_REQUEST:
                return
            self._quit(
                f"{number.name} again: quitting now; earlier checkpoints are unchanged", of_signal(number)
            )
        self._first_at = time.monotonic()
        self._requested.set()
        self._say(
            f"{number.name}: finishing this step and saving; signal again after {SAME_REQUEST:g} s to quit now"
        )

    def _quit(self, text: str, code: int) -> NoReturn:
        self._say(text)
        with suppress(OSError):
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)  # the progress bar has hidden it
        os._exit(code)

    def _say(self, text: str) -> None:
        if self._announce:
            with suppress(OSError):  # its reader may be gone
                os.write(2, f"penstock: {text}\n".encode())


def _leave_to_thread(number: int, frame: object) -> None:
    """Do nothing; without a handler the signal would not be written to the pipe."""
