"""Commands that tests start: one that does not end fails its test with what its processes were doing, and leaves none."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def start(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a command in a session of its own, whose Python processes show their stacks when they are aborted."""
    return subprocess.Popen(
        command, cwd=folder, env={**environment, "PYTHONFAULTHANDLER": "1"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], seconds: float) -> str:
    """Wait for a command and return its output; end all its processes, and fail with their stacks, if it takes too long."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        left = [process.pid, *_descendants(process.pid)]
        # Stopped first, so that no parent ends a child before it has shown its stack.
        for number in (signal.SIGSTOP, signal.SIGABRT, signal.SIGCONT):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        try:
            shown = process.communicate(timeout=20)[0]
        except subprocess.TimeoutExpired:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shown = process.communicate(timeout=20)[0]
    raise AssertionError(f"{process.args} did not end within {seconds:g} s; what its processes did:\n{shown}")


def _descendants(pid: int) -> list[int]:
    """Return the ids of the running processes below a process, parents first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, pending = [], [pid]
    while pending:
        below = parents.get(pending.pop(0), [])
        found += below
        pending += below
    return found
