"""Ends every process that this one has started once this one has ended, however it ended.

A kill leaves a process no time to end its children, and those that lead a session of their own do not hear of Ctrl-C
either. All that a process starts inherits its environment, so a mark in there finds them; a guard in a session of its own
waits for the process's end and then kills what has the mark. Linux only: it reads ``/proc``.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "PENSTOCK_STARTED_BY"
"""An environment variable: the marks of the processes that have started this one, with slashes between them."""


def end_with_this_process() -> None:
    """Mark the children that this process starts from now on, and start the guard that kills them after it."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    own = f"{os.getpid()}-{time.time_ns()}"
    os.environ[MARK] = "/".join(filter(None, (os.environ.get(MARK), own)))
    null = [(os.POSIX_SPAWN_OPEN, end, os.devnull, os.O_RDWR, 0) for end in range(3)]
    command = [sys.executable, "-IS", __file__, str(os.getpid()), own]
    os.posix_spawn(command[0], command, environment, file_actions=null, setsid=True)


def having(variable: str, value: str) -> list[int]:
    """Return the ids of the running processes that started with a value among those of a variable; no zombies."""
    return [pid for pid, words in _environments() if value in words.get(variable, "").split("/")]


def running_in(variable: str, value: str) -> list[int]:
    """Return the ids of the running processes that started with this very value of a variable; no zombies."""
    return [pid for pid, words in _environments() if words.get(variable) == value]


def _environments() -> Iterator[tuple[int, dict[str, str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "environ").read_bytes().decode("utf-8", "replace").split("\0")
            except OSError:
                continue
            yield int(entry.name), dict(word.split("=", 1) for word in words if "=" in word)


def _guard(process: int, mark: str) -> None:
    os.chdir("/")
    with suppress(ProcessLookupError):
        ended = os.pidfd_open(process)
        if os.getppid() == process:  # else it had ended before, and its number may be another's
            select.select([ended], [], [])
    limit = time.monotonic() + 30.0
    while (left := having(MARK, mark)) and time.monotonic() < limit:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
