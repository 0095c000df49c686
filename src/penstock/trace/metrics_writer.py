"""Metrics of a run: lines of JSON in its folder; docs/reference/metrics.md has a table of them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from penstock.base.atomic import write_bytes
from penstock.base.bounded_io import parse_json
from penstock.base.host import utc

METRICS = "metrics.jsonl"


def go_back(run: Path, step: int, evaluates: bool = False) -> None:
    """Create the metrics of a run, or remove later steps, the last line of a finished run, and malformed lines."""
    path = run / METRICS
    if not path.exists():
        path.touch()
        return
    lines = path.read_bytes().splitlines(keepends=True)
    write_bytes(path, b"".join(line for line in lines if _stays(line, step, evaluates)))


def final_values(path: Path) -> dict[str, Any] | None:
    """Return the last line of a finished run's metrics, which is written after the weights; None if it is not finished."""
    try:
        lines = (path / METRICS).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    entry = _entry(lines[-1]) if lines else None
    return entry if entry is not None and entry.get("kind") == "final" else None


class MetricsWriter:
    """The file ``metrics.jsonl``: one JSON object a line, on disk as soon as `write` returns.

    A failed write (a full disk) is reported once and left out; training continues.

    Args:
        path: folder of the run; None writes nothing, as on every rank but the first.
    """

    def __init__(self, path: Path | None, say: Callable[[str], None] = lambda text: None) -> None:
        self.writes = path is not None
        self._say = say
        self._reported = False
        self._path = path / METRICS if path else Path()
        # Unbuffered: no rest of a line that did not fit on the disk may be written later.
        self._file = self._path.open("ab", buffering=0) if path else None

    def write(self, kind: str, **values: Any) -> None:
        """Append a line of a kind, with the time: ``train``, ``skipped``, ``held_out`` or ``final``."""
        if self._file is None:
            return
        line = json.dumps({"kind": kind, "time": utc(), **values}, allow_nan=False) + "\n"
        try:
            self._append(self._file, line.encode())
        except OSError as error:
            if not self._reported:
                self._reported = True
                self._say(f"{self._path} lacks lines: {error.strerror or error}. Training continues")

    @staticmethod
    def _append(file: BinaryIO, line: bytes) -> None:
        """Append the whole line or nothing."""
        before = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()


def _stays(line: bytes, step: int, evaluates: bool) -> bool:
    entry = _entry(line)
    if entry is None or entry.get("kind") == "final":
        return False
    done = entry.get("step", 0)
    repeated = evaluates and entry.get("kind") == "held_out" and done == step
    return isinstance(done, int | float) and done <= step and not repeated


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if the line is malformed or incomplete."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    return entry if line.endswith(b"\n") and isinstance(entry, dict) else None
