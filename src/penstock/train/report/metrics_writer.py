"""The numbers of a run: a line of JSON each in its folder, and what loggers make of them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from penstock.atomic import write_bytes
from penstock.bounded_io import parse_json
from penstock.scratch import Scratch
from penstock.show.picture import draw_picture
from penstock.trace.events import Trace
from penstock.train.report.loggers import Logger

METRICS = "metrics.jsonl"
"""Within a run's folder."""


def go_back(run: Path, step: int) -> None:
    """Begin the metrics of a run, or cut them back: lines of later steps go, the last of a finished run, broken ones.

    Raises:
        OSError: the file cannot be written.
    """
    path = run / METRICS
    if not path.exists():
        path.touch()
        return
    lines = path.read_bytes().splitlines(keepends=True)
    write_bytes(path, b"".join(line for line in lines if _is_until(line, step)))


def is_finished(path: Path) -> bool:
    """Whether a run has come to its end: its metrics have the last line, which is written after the weights."""
    try:
        lines = (path / METRICS).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return False
    return any((_entry(line) or {}).get("kind") == "final" for line in lines[-1:])


class MetricsWriter:
    """``metrics.jsonl``: one JSON object a line, on disk as soon as it is written.

    What cannot be written (a full disk) is told once, and left out; training goes on.

    Args:
        path: of the run folder; None writes nothing, as on every rank but the first.
        loggers: get the same numbers, named ``kind/key``, and are closed with it.
        say: where it is told what could not be written.

    Attributes:
        writes: whether anything is written here.
    """

    def __init__(
        self,
        path: Path | None,
        loggers: Sequence[Logger] = (),
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.writes = path is not None
        self._say = say
        self._told: set[str] = set()
        self._loggers = loggers
        self._path = path / METRICS if path else Path()
        # Unbuffered: of a line that a full disk has not taken nothing must be left to be written later.
        self._file = self._path.open("ab", buffering=0) if path else None

    def write(self, kind: str, **values: int | float | None) -> None:
        """Append a line; `kind` is ``train``, ``skipped``, ``held_out`` or ``final``."""
        if self._file is not None:
            line = json.dumps({"kind": kind, **values}, allow_nan=False) + "\n"
            with self._telling(f"{self._path} lacks lines"):
                self._append(self._file, line.encode())
        step = values.get("step")
        if isinstance(step, int):
            named = {f"{kind}/{key}": v for key, v in values.items() if key != "step" and v is not None}
            for logger in self._loggers:
                with self._telling(f"{type(logger).__name__} lacks numbers"):
                    logger.scalars(step, named)

    def timeline(self, step: int, trace: Trace) -> None:
        """Give the loggers the picture of a step's timeline; without any nothing is drawn."""
        if not self._loggers:
            return
        with (
            self._telling("a logger lacks timelines"),
            Scratch() as scratch,
        ):
            path = scratch.path / "timeline.png"
            draw_picture(trace, path)
            for logger in self._loggers:
                logger.picture(step, "timeline", path)

    @staticmethod
    def _append(file: BinaryIO, line: bytes) -> None:
        """The whole line, or nothing of it."""
        before = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if what not in self._told:
                self._say(f"{what}: {error.strerror or error}. Training goes on")
                self._told.add(what)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        for logger in self._loggers:
            with self._telling(f"{type(logger).__name__} lacks numbers"):
                logger.close()


def _is_until(line: bytes, step: int) -> bool:
    entry = _entry(line)
    if entry is None or entry.get("kind") == "final":
        return False
    done = entry.get("step", 0)
    return isinstance(done, int | float) and done <= step


def _entry(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line; None of one that is broken or was cut short."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    return entry if line.endswith(b"\n") and isinstance(entry, dict) else None
