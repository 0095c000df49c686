"""Signs of life of a run's processes: one small file per process, ``RUN/logs/rank-N.json``, rewritten in place every second.

Another process that reads the files sees which ranks live, at which step they are, and how they ended.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import time
from typing import Literal, Self

from penstock import host
from penstock.bounded_io import parse_json, read_bytes

LOGS = "logs"
"""Folder of the logs and the signs of life, in the run's folder."""
INTERVAL = 1.0
"""Seconds between two signs of life."""

_MAX_BYTES = 4096
_MAX_ERROR = 1000
_NAME = re.compile(r"rank-(\d{1,7})\.json")

State = Literal["running", "done", "stopped", "failed"]


@dataclass(frozen=True)
class LifeSign:
    """The last sign of life of a process.

    Attributes:
        rank: rank of the process.
        state: ``running``, or how it ended: ``done``, ``stopped`` or ``failed``.
        step: steps done.
        step_time: time at which the last step ended, in seconds since the epoch.
        time: time of this sign, likewise.
        began: time at which the process began the run, likewise.
        rss: memory of the process in bytes.
        host: name of its host.
        place: identifier of the machine and of the namespace in which `pid` counts.
        pid: number of the process.
        started: moment at which the process started, as the kernel counts; tells it from a later one with the same number.
        error: message of the error that ended it; empty if none did.
    """

    rank: int
    state: str
    step: int
    step_time: float
    time: float
    began: float
    rss: int
    host: str
    place: str
    pid: int
    started: str
    error: str


class Heartbeat:
    """Writer of this process's signs of life, from a thread of its own; a context manager.

    A sign that cannot be written (a full disk) is left out.

    Args:
        run: folder of the run.
        rank: rank of this process.
        step: steps done before.

    Attributes:
        step: steps done; set it after every step.
    """

    def __init__(self, run: Path, rank: int, step: int = 0) -> None:
        self._path = run / LOGS / f"rank-{rank}.json"
        self._rank = rank
        self._step = step
        self._began = self._step_time = time()
        self._length = 0
        self._file: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="penstock-heartbeat", daemon=True)

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, done: int) -> None:
        self._step, self._step_time = done, time()

    def end(self, state: State, error: str = "") -> None:
        """Write how the run ended for this process; the last sign."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self._write(state, error)

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(
            "done" if error is None else "failed", "" if error is None else str(error) or type(error).__name__
        )
        if self._file is not None:
            os.close(self._file)

    def _beat(self) -> None:
        while True:
            self._write("running", "")
            if self._ended.wait(INTERVAL):
                return

    def _write(self, state: State, error: str) -> None:
        sign = LifeSign(
            self._rank, state, self._step, self._step_time, time(), self._began, host.process_memory()[0],
            socket.gethostname(), _place(), os.getpid(), _process(os.getpid())[1], error[:_MAX_ERROR],
        )  # fmt: skip
        # Over the last sign, at one go: a reader may see a mixture of two, which is not JSON, and reads again.
        data = json.dumps(asdict(sign)).encode()
        padded, self._length = data.ljust(self._length), len(data)
        if self._file is not None:
            with suppress(OSError):
                os.pwrite(self._file, padded, 0)


def clear_signs(run: Path) -> None:
    """Delete the signs of life of an earlier start, which may have had more processes; before any process gives one."""
    for sign in read_signs(run):
        with suppress(OSError):
            (run / LOGS / f"rank-{sign.rank}.json").unlink()


def read_signs(run: Path) -> list[LifeSign]:
    """Return the last sign of life of every process of a run, by rank; unreadable ones are left out."""
    signs = []
    try:
        names = sorted(os.listdir(run / LOGS))
    except OSError:
        return []
    for name in names:
        if _NAME.fullmatch(name) and (sign := _read(run / LOGS / name)) is not None:
            signs.append(sign)
    return sorted(signs, key=lambda sign: sign.rank)


def lives(sign: LifeSign) -> bool | None:
    """Return whether the process that gave a sign still exists; None if it is on another machine, or in a container."""
    if sign.place != _place() or not sign.started:
        return None
    state, started = _process(sign.pid)
    return started == sign.started and state not in ("Z", "X")


def _read(path: Path) -> LifeSign | None:
    try:
        table = parse_json(read_bytes(path, _MAX_BYTES + 2 * _MAX_ERROR))
        kinds = {each.name: each.type for each in fields(LifeSign)}
        allowed: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
        if not all(isinstance(table[name], allowed[str(kind)]) for name, kind in kinds.items()):
            return None
        return LifeSign(**{name: table[name] for name in kinds})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _place() -> str:
    """Return the machine and the namespace of this process's number; empty if the system does not tell."""
    try:
        return f"{host.machine()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process(pid: int) -> tuple[str, str]:
    """Return the state of a process and the moment at which it started; empty texts if there is none."""
    try:
        # The name of the command, in parentheses, may have spaces.
        values = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return values[0], values[19]
    except (OSError, IndexError):
        return "", ""
