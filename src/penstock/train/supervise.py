"""``penstock train --restarts``: one process per rank on this machine, restarted from the newest checkpoint after a failure.

A thin use of `torch.distributed.elastic`: its multiprocessing starts the processes and carries their errors. Its agent is
not used, because it counts restarts but not progress, its rendezvous listens on all interfaces, and it waits 30 s for a
process that is stopped. The processes meet through a file, and nothing listens beyond the loopback interface.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
    start_processes,
)

from penstock.base.bounded_io import parse_json
from penstock.base.errors import ConfigError
from penstock.base.host import to_stderr
from penstock.base.run_lock import locked
from penstock.base.scratch import Scratch
from penstock.checkpoint.find import FOLDER, is_checkpoint, is_whole, step_of, steps_in
from penstock.runtime.health.peers import is_stopped
from penstock.runtime.start.meeting import STORE
from penstock.runtime.workers.pool import require_processes
from penstock.train import run_folder
from penstock.train.config.config import Config
from penstock.train.config.file import dump
from penstock.train.config.resolve import processes_of
from penstock.train.signals import LAUNCHER, SIGNALS, ExitCode, Interrupts

TRAIN = (sys.executable, "-P", "-m", "penstock", "train")

GRACE = 2.0
"""Seconds that the other processes have to end by themselves, and to say why, after one has failed; then they are killed.
If only stopped ones are left, they are killed at once."""

STOPPING = 30.0
"""Seconds that the other processes have to end after one has stopped in good order."""

# Seconds between two looks at the processes: far below `GRACE`, and no load.
_POLL = 0.05
_FINAL = (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.NOT_FINITE, ExitCode.STOPPED)
"""Ends of a run that a restart would not change."""
_SECONDARY = ("PeerError", "WaitTimeoutError", "TransportError")
"""Errors by which a process says that another one failed."""
_TORCH_HANDLES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

Say = Callable[[str], None]


def supervise(
    config: Config,
    *,
    restarts: int,
    command: Sequence[str] = TRAIN,
    options: Sequence[str] = (),
    say: Say = to_stderr,
) -> ExitCode:
    """Train in one process per rank, and restart all of them from the newest complete checkpoint when one fails.

    Call it in the main thread. A signal that asks to stop (see `signals`) is passed on to the processes as SIGTERM; they
    save and end. A later one ends everything at once. If this process is killed, its processes are killed too (on Linux).

    Args:
        restarts: restarts in a row that may fail without a newer complete checkpoint.
        command: command of each process (default: ``penstock train``), to which arguments of ``penstock train`` are added:
            the config's file, `options`, and ``--resume`` with the checkpoint to resume from. Its environment has torchrun's
            RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and TORCHELASTIC_RESTART_COUNT (0 at the first start).
    """
    if sys.platform == "darwin" and sys.version_info < (3, 13):
        raise ConfigError(
            f"--restarts must see which process ended first, which Python on macOS can from 3.13 on, got "
            f"{sys.version_info[0]}.{sys.version_info[1]}; use a newer Python, or leave --restarts out"
        )
    run = run_folder.choose(config.train)
    if run.name in ("", ".."):  # the current folder, or the one above
        run = run.resolve()
    ranks = processes_of(config.parallel)
    require_processes(ranks)
    with ExitStack() as stack:
        stack.enter_context(locked(run, say=say))
        policy = _RestartPolicy(run, config.train.resume, restarts)
        scratch = stack.enter_context(Scratch()).path
        interrupts = stack.enter_context(Interrupts(announce=True))
        file = scratch / "run.toml"
        # Each start passes on where to resume.
        named = replace(config.train, folder=str(run.parent), name=run.name, resume="")
        file.write_text(dump(replace(config, train=named)), "utf-8")
        while True:
            arguments = (*command, str(file), *options, *policy.resume_options)
            end = Start(arguments, ranks, policy.attempt, scratch).run(interrupts)
            if end.reason:
                say(end.reason)
            if end.code in _FINAL or interrupts.asked():
                return end.code
            if not policy.restart(say):
                return ExitCode.GAVE_UP if restarts else end.code


class _RestartPolicy:
    """Decision after each failure whether to restart, and from which checkpoint."""

    def __init__(self, run: Path, resume: str, restarts: int) -> None:
        self._run = run
        self._resume = resume
        self._restarts = restarts
        self._at_start = _newest(run)
        self._chosen = step_of(Path(resume)) if resume and is_checkpoint(Path(resume)) else None
        self._best = self._at_start if self._chosen is None else self._chosen
        self._failed = 0
        self.attempt = 0

    @property
    def resume_options(self) -> tuple[str, ...]:
        return ("--resume", self._resume) if self._resume else ()

    def restart(self, say: Say) -> bool:
        """Return whether to restart after a failure; prepare it, and say so."""
        newest = _newest(self._run)
        if newest > self._best:
            self._failed, self._best = 0, newest
        if self._failed == self._restarts:
            if self._restarts:
                checkpoints = self._run / FOLDER
                say(
                    f"gave up: {self._failed} restart(s) in a row without a newer checkpoint in {checkpoints}"
                )
            return False
        self._failed += 1
        self.attempt += 1
        # A chosen checkpoint older than the newest remains chosen until the run has gone back to it.
        if self._chosen is None or newest != self._at_start or newest <= self._chosen:
            self._resume = run_folder.AUTO
        state = f"the newest is of step {newest}" if newest >= 0 else "there is none yet"
        say(f"restart {self._failed} of {self._restarts} without a newer checkpoint; {state}")
        return True


def _newest(run: Path) -> int:
    """Return the step of a run's newest complete checkpoint; -1 if it has none."""
    return next((step for step, path in steps_in(run / FOLDER) if is_whole(path)), -1)


@dataclass(frozen=True)
class End:
    """The end of one start."""

    code: ExitCode
    reason: str = ""


class Start:
    def __init__(self, command: Sequence[str], ranks: int, attempt: int, scratch: Path) -> None:
        self._command = command
        self._ranks = ranks
        self._attempt = attempt
        self._scratch = scratch
        self._codes: dict[int, int] = {}
        self._killed: set[int] = set()

    def run(self, interrupts: Interrupts) -> End:
        """Start the processes and wait until all have ended; after a failure, kill whatever they left running."""
        try:
            context = self._start()
        except SignalException:  # torch raised it while it started the processes, and has ended them
            return End(ExitCode.STOPPED)
        pids = context.pids()
        try:
            self._wait(pids, interrupts)
            end = self._judge(interrupts.asked(), context.error_files)
        except BaseException:
            _kill(pids.values())
            raise
        else:
            if end.code != ExitCode.DONE:
                _kill(pids.values())
        finally:
            context.close()
        return end

    def _start(self) -> PContext:
        shared = {
            "WORLD_SIZE": str(self._ranks),
            "LOCAL_WORLD_SIZE": str(self._ranks),
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt),
            # A new file for each start: an old one has the keys of processes that are gone.
            STORE: str(self._scratch / f"store-{self._attempt}"),
            LAUNCHER: str(os.getpid()),
        }
        ours = {number: signal.getsignal(number) for number in _TORCH_HANDLES}
        try:
            # It installs torch's own handlers for these signals; ours come back behind it.
            return start_processes(
                "penstock",
                self._command[0],
                {rank: tuple(self._command[1:]) for rank in range(self._ranks)},
                {r: {**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(self._ranks)},
                DefaultLogsSpecs(log_dir=str(self._scratch / f"attempt-{self._attempt}")),
            )
        finally:
            for number, handler in ours.items():
                signal.signal(number, handler)

    def _wait(self, pids: dict[int, int], interrupts: Interrupts) -> None:
        passed_on, deadline = False, float("inf")
        while running := self._running(pids):
            # Once only: a process ends without saving at a second signal.
            if interrupts.asked() and not passed_on:
                passed_on = True
                for rank in running:
                    os.kill(pids[rank], signal.SIGTERM)
            failures = {code for code in self._codes.values() if code}
            now = time.monotonic()
            if failures:
                deadline = min(deadline, now + (STOPPING if failures == {ExitCode.STOPPED} else GRACE))
            # A process that is stopped can neither end nor say why, so there is nothing to wait for.
            if now > deadline or (failures and all(is_stopped(pids[rank]) for rank in running)):
                self._killed.update(running)
                _kill(pids[rank] for rank in running)
            time.sleep(_POLL)

    def _running(self, pids: dict[int, int]) -> list[int]:
        """Note the exit codes of processes that have ended, and return the ranks that still run."""
        for rank, pid in pids.items():
            if rank not in self._codes and (code := _exit_code(pid)) is not None:
                self._codes[rank] = code
        return [rank for rank in pids if rank not in self._codes]

    def _judge(self, asked: bool, error_files: dict[int, str]) -> End:
        codes = {rank: code for rank, code in self._codes.items() if rank not in self._killed}
        # A process that was not ready to handle the signal was ended by it, before it had done anything to save.
        orderly = {ExitCode.DONE, ExitCode.STOPPED, *([-number for number in SIGNALS] if asked else [])}
        failed = [rank for rank, code in codes.items() if code not in orderly]
        if not failed:
            return End(ExitCode.STOPPED if any(codes.values()) or self._killed else ExitCode.DONE)
        messages = {rank: _message(Path(error_files[rank])) for rank in failed}
        # Of several, the one that ended first.
        first = min(failed, key=lambda rank: messages[rank].startswith(_SECONDARY))
        code = codes[first]
        reason = (
            f"killed by {signal.Signals(-code).name}" if code < 0 else messages[first] or f"exit code {code}"
        )
        known = code in tuple(ExitCode) and code != ExitCode.GAVE_UP
        return End(ExitCode(code) if known else ExitCode.FAILED, f"rank {first} failed first: {reason}")


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a process that has ended, negative for a signal; the process remains to be waited for."""
    if sys.platform == "darwin" and sys.version_info < (3, 13):
        raise AssertionError  # `supervise` has refused
    # With WNOWAIT the process keeps its id, which `_kill` could otherwise give to a stranger.
    state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def _kill(pids: Iterable[int]) -> None:
    """Kill processes, and everything left of what they started: each leads a process group."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _message(error_file: Path) -> str:
    """Return the error that a process has reported in a file; empty if none."""
    try:
        message = parse_json(error_file.read_bytes())["message"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return str(message["message"] if isinstance(message, dict) else message)
