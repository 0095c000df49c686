"""Commands that tests start: one that does not end fails its test with what its processes were doing, and leaves none."""

from __future__ import annotations

import atexit
import faulthandler
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory


def python(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] = os.environ,
    seconds: float = 300.0,
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` in a process that is forked from one that has imported torch, and return how it ended.

    Half of what a short command computes is that import. Commands that are about starting and ending processes are started
    as usual.

    Args:
        words: ``-m MODULE`` or a script, and arguments.
        folder: the current folder.
        environment: environment variables (default: this process's).
        seconds: seconds after which it is killed, with all that it has started, and the test fails.
        merged: whether stderr is part of stdout (default False).
    """
    from penstock.runtime.workers.pool import process_context

    with TemporaryDirectory() as kept:
        outputs = [Path(kept, name) for name in ("out", "out" if merged else "err")]
        told = (list(words), str(folder), dict(environment), *map(str, outputs))
        process = process_context().Process(target=_run, args=told)
        process.start()
        process.join(seconds)
        if hangs := process.is_alive():
            left = [process.pid, *_descendants(process.pid)]
            _abort(left)
            process.join(20)
            _send(left, signal.SIGKILL)
            process.join()
        out, err = (path.read_text("utf-8", "replace") for path in outputs)
    if hangs:
        raise AssertionError(f"{words} did not end within {seconds:g} s:\n{out}\n{err}")
    return subprocess.CompletedProcess(list(words), process.exitcode, out, "" if merged else err)


def _run(words: list[str], folder: str, environment: dict[str, str], out: str, err: str) -> None:
    """Be the interpreter of a command."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for path, number in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    faulthandler.enable(sys.__stderr__)
    if threads := environment.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    for entry in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        sys.path.insert(0, entry)
    try:
        if words[0] == "-m":
            sys.path.insert(0, folder)
            sys.argv = list(words[1:])
            # As the interpreter does it; with `run_module`, processes that it starts would not find its classes.
            runpy._run_module_as_main(words[1])
        else:
            sys.path.insert(0, str(Path(folder, words[0]).parent))
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing's processes leave them out


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
        _abort(left)
        try:
            shown = process.communicate(timeout=20)[0]
        except subprocess.TimeoutExpired:
            _send(left, signal.SIGKILL)
            shown = process.communicate(timeout=20)[0]
    raise AssertionError(f"{process.args} did not end within {seconds:g} s; what its processes did:\n{shown}")


def _abort(processes: Sequence[int]) -> None:
    """Make processes show their stacks and end."""
    # Stopped first, so that no parent goes on because a child has ended, or ends a child before it has shown its stack.
    for number in (signal.SIGSTOP, signal.SIGABRT, signal.SIGCONT):
        _send(processes, number)


def _send(processes: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to the processes that are still there."""
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


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
