"""One process a rank on this machine, started anew from the newest checkpoint when one fails: ``penstock train --restarts``.

A thin use of `torch.distributed.elastic`: its multiprocessing starts the processes and carries their errors. Its agent is
not used: it counts restarts but no progress, its rendezvous listens on all interfaces, and it waits 30 s for a process that
is stopped. The processes meet through a file, and nothing listens beyond the loopback interface.
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

from penstock.bounded_io import parse_json
from penstock.checkpoint.find import FOLDER, is_checkpoint, is_whole, steps_in
from penstock.host import to_stderr
from penstock.launch.exit_codes import ExitCode
from penstock.launch.parent_death import LAUNCHER
from penstock.launch.signals import SIGNALS, Interrupts
from penstock.run_lock import locked
from penstock.runtime.health.peers import is_stopped
from penstock.runtime.workers.pool import require_processes
from penstock.runtime.workers.world import STORE
from penstock.scratch import Scratch
from penstock.train import run_folder
from penstock.train.config.config import Config
from penstock.train.config.file import dump
from penstock.train.config.mesh_config import processes_of

TRAIN = (sys.executable, "-m", "penstock", "train")

GRACE = 2.0
"""Seconds that the others have to end by themselves, and to say why, once one has failed; then they are killed. Where only
stopped ones are left, nobody is waited for."""

STOPPING = 30.0
"""The same, once one has stopped in good order."""

_POLL = 0.05
_FINAL = (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.NOT_FINITE, ExitCode.STOPPED)
"""Ends of a run that another start would not change."""
_SECOND = ("PeerError", "WaitTimeoutError", "TransportError")
"""Errors by which a process says that another one failed."""
_TORCHS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

Say = Callable[[str], None]


def supervise(
    config: Config,
    *,
    restarts: int,
    command: Sequence[str] = TRAIN,
    words: Sequence[str] = (),
    say: Say = to_stderr,
) -> ExitCode:
    """Train in one process a rank, and start all of them anew, from the newest complete checkpoint, when one fails.

    Call it in the main thread. A signal that asks to stop (see `signals`) is passed on to the processes as SIGTERM; they
    save and end. A later one ends everything at once. Should this process be killed, they are, too (on Linux).

    Args:
        config: of the run; ``[parallel]`` says how many processes.
        restarts: how many starts in a row may fail without a newer complete checkpoint, after the first one.
        command: what a process runs, with arguments of ``penstock train`` put after it: the config's file, `words`, and
            ``--resume`` with what to go on from. Its environment has what torchrun's has of RANK, WORLD_SIZE, LOCAL_RANK,
            LOCAL_WORLD_SIZE and TORCHELASTIC_RESTART_COUNT (0 at the first start).
        words: further arguments.
        say: where it is told what failed first, and what is done.

    Returns:
        How it ended.

    Raises:
        ConfigError: the run's folder is already there or in use, or what to go on from is not there, or this
            machine has not the memory for so many processes; nothing has been started then.
    """
    run = run_folder.choose(config.train)
    if run.name in ("", ".."):  # the folder it was started in, or the one above
        run = run.resolve()
    resume = config.train.resume
    config = replace(config, train=replace(config.train, folder=str(run.parent), name=run.name, resume=""))
    ranks = processes_of(config.parallel)
    require_processes(ranks)
    failed = attempt = 0
    with ExitStack() as stack:
        stack.enter_context(locked(run, say=say))
        at_start = newest = _newest(run)
        chosen = Path(resume) if resume and is_checkpoint(Path(resume)) else None
        best = _step_of(chosen) if chosen else newest
        scratch = stack.enter_context(Scratch()).path
        interrupts = stack.enter_context(Interrupts(tells=True))
        file = scratch / "run.toml"
        file.write_text(dump(config), "utf-8")
        while True:
            going_on = ("--resume", resume) if resume else ()
            start = Start((*command, str(file), *words, *going_on), ranks, attempt, scratch)
            end = start.run(interrupts)
            if end.reason:
                say(end.reason)
            if end.code in _FINAL or interrupts.asked():
                return end.code
            newest = _newest(run)
            if newest > best:
                failed, best = 0, newest
            if failed == restarts:
                if not restarts:
                    return end.code
                say(f"gave up: {failed} restart(s) in a row without a newer checkpoint in {run / FOLDER}")
                return ExitCode.GAVE_UP
            failed += 1
            attempt += 1
            # An earlier checkpoint than the newest stays what is meant until the run has gone back to it.
            if chosen is None or newest != at_start or newest <= _step_of(chosen):
                resume = run_folder.AUTO
            say(
                f"starting again, {failed} of {restarts} without a newer checkpoint; "
                + (f"the newest is of step {newest}" if newest >= 0 else "there is none yet")
            )


def _newest(run: Path) -> int:
    """The step of a run's newest complete checkpoint; -1 if it has none."""
    return next((step for step, path in steps_in(run / FOLDER) if is_whole(path)), -1)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


@dataclass(frozen=True)
class End:
    """How the processes of one start ended: an exit code for all of them, and if one failed, which first and why."""

    code: ExitCode
    reason: str = ""


class Start:
    """One start of all processes.

    Args:
        command: of each.
        ranks: how many.
        attempt: how many starts there were before.
        scratch: a folder for what they meet through and what they say of errors.
    """

    def __init__(self, command: Sequence[str], ranks: int, attempt: int, scratch: Path) -> None:
        self._command = command
        self._ranks = ranks
        self._attempt = attempt
        self._scratch = scratch
        self._codes: dict[int, int] = {}
        self._killed: set[int] = set()

    def run(self, interrupts: Interrupts) -> End:
        """Start them, wait until all have ended, and see that nothing of them is left if they failed."""
        try:
            context = self._start()
        except SignalException:  # torch's own, while it started them; it has ended them
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
            STORE: str(self._scratch / f"store-{self._attempt}"),
            LAUNCHER: str(os.getpid()),
        }
        ours = {number: signal.getsignal(number) for number in _TORCHS}
        try:
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
        asked, limit = False, float("inf")
        while True:
            for rank, pid in pids.items():
                if rank not in self._codes and (code := _exit_code(pid)) is not None:
                    self._codes[rank] = code
            running = [rank for rank in pids if rank not in self._codes]
            if not running:
                return
            if interrupts.asked() and not asked:
                asked = True
                for rank in running:
                    os.kill(pids[rank], signal.SIGTERM)
            bad = {code for code in self._codes.values() if code}
            now = time.monotonic()
            if bad:
                limit = min(limit, now + (STOPPING if bad == {ExitCode.STOPPED} else GRACE))
            if now > limit or (bad and all(is_stopped(pids[rank]) for rank in running)):
                self._killed.update(running)
                _kill(pids[rank] for rank in running)
            time.sleep(_POLL)

    def _judge(self, asked: bool, error_files: dict[int, str]) -> End:
        codes = {rank: code for rank, code in self._codes.items() if rank not in self._killed}
        # One that was not ready to take the signal has ended by it, with nothing done that could be saved.
        orderly = {ExitCode.DONE, ExitCode.STOPPED, *([-number for number in SIGNALS] if asked else [])}
        failed = [rank for rank, code in codes.items() if code not in orderly]
        if not failed:
            return End(ExitCode.STOPPED if any(codes.values()) or self._killed else ExitCode.DONE)
        said = {rank: _said(Path(error_files[rank])) for rank in failed}
        first = min(
            failed, key=lambda rank: said[rank].startswith(_SECOND)
        )  # of equals the one that ended first
        code = codes[first]
        how = f"{signal.Signals(-code).name} ended it" if code < 0 else said[first] or f"exit code {code}"
        known = code in tuple(ExitCode) and code != ExitCode.GAVE_UP
        return End(ExitCode(code) if known else ExitCode.FAILED, f"rank {first} failed first: {how}")


def _exit_code(pid: int) -> int | None:
    """Of a process that has ended, negative for a signal; it stays to be waited for."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _kill(pids: Iterable[int]) -> None:
    """Kill processes, and all that is left of what they started: each leads a process group."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _said(error_file: Path) -> str:
    """What a process has written there of its error; empty if nothing."""
    try:
        message = parse_json(error_file.read_bytes())["message"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return str(message["message"] if isinstance(message, dict) else message)
