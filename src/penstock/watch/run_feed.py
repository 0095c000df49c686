"""News from a run's folder, read again and again while the run is under way; nothing is written."""

from __future__ import annotations

import os
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bounded_io import MEGABYTE, open_regular, parse_json, read_bytes
from penstock.heartbeat import INTERVAL, LifeSign, lives, read_signs
from penstock.show.units import finite
from penstock.trace.folder import FOLDER, step_path

SILENT = 10 * INTERVAL
"""Seconds without a sign of life after which a rank on another machine counts as silent."""
MAX_ROWS = 4000
"""Rows of metrics sent at once; of more, evenly spaced ones."""

_READ_AT_ONCE = 64 * MEGABYTE
_REFRESH = 0.25  # seconds: several viewers share what was read
_KINDS = ("train", "skipped", "held_out", "final")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RankHealth:
    """The health of one process.

    Attributes:
        rank: rank of the process.
        host: name of its host.
        health: ``running``, ``silent``, ``dead``, or how it ended: ``done``, ``stopped``, ``failed``.
        step: steps done.
        step_age: seconds since its last step.
        age: seconds since its last sign of life.
        rss: memory in bytes.
        error: message of the error that ended it; empty if none did.
    """

    rank: int
    host: str
    health: str
    step: int
    step_age: float
    age: float
    rss: int
    error: str


class RunFeed:
    """A run's folder as those who watch it need it; may be used by several threads.

    Args:
        run: folder of the run, which may not exist yet.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.title = run.resolve().name
        self._lock = threading.Lock()
        self._metrics = _GrowingFile(run / "metrics.jsonl")
        self._rows: list[Row] = []
        self._generation = 0
        self._signs: list[LifeSign] = []
        self._seen: dict[int, tuple[float, float]] = {}
        self._read_at = 0.0

    def state(self, generation: int, rows: int) -> dict[str, Any]:
        """Return the state of the run as JSON can hold it.

        Args:
            generation: ``generation`` of the last answer; -1 at first.
            rows: ``count`` of the last answer; 0 at first.

        Returns:
            ``title``; ``state`` and ``message``, see `_judge`; ``step`` and ``steps`` (0 if unknown); ``rows``, new rows of
            metrics if `generation` is still the same, else all; ``generation`` and ``count`` for the next call; ``ranks``,
            a `RankHealth` each; ``traced``, the newest traced step or None.
        """
        with self._lock:
            self._refresh()
            now = time.time()
            ranks = [self._health(sign, now) for sign in self._signs]
            state, message = _judge(ranks, self._rows)
            new = self._rows[rows:] if generation == self._generation else self._rows
            steps = [row["step"] for row in self._rows[-1:]] + [
                one.step for one in ranks if one.health == "running"
            ]
            return {
                "title": self.title,
                "state": state,
                "message": message,
                "step": max(steps, default=0),
                "steps": self._steps(),
                "generation": self._generation,
                "count": len(self._rows),
                "rows": _spaced(new),
                "ranks": [vars(one) for one in ranks],
                "traced": max(self.traced(), default=None),
            }

    def traced(self) -> list[int]:
        """Return the steps that have a trace."""
        try:
            names = set(os.listdir(self.run / FOLDER))
        except OSError:
            return []
        digits = (name.removeprefix("step-").removesuffix(".npz") for name in names)
        steps = sorted({int(text) for text in digits if text.isascii() and text.isdigit() and len(text) < 12})
        return [step for step in steps if step_path(self.run, step).name in names]

    @property
    def version(self) -> tuple[int, int, int]:
        """A value that changes with metrics and traces."""
        with self._lock:
            self._refresh()
            return self._generation, len(self._rows), max(self.traced(), default=0)

    def _refresh(self) -> None:
        if time.monotonic() - self._read_at < _REFRESH:
            return
        if self._metrics.replaced():
            self._rows, self._generation = [], self._generation + 1
        self._rows += _rows(self._metrics.lines())
        self._signs = read_signs(self.run)
        self._read_at = time.monotonic()

    def _health(self, sign: LifeSign, now: float) -> RankHealth:
        # The clock of another host may be wrong, so the time since the sign changed counts, once it was seen to change.
        seen, since = self._seen.get(sign.rank, (sign.time, time.monotonic() - max(0.0, now - sign.time)))
        if seen != sign.time:
            since = time.monotonic()
        self._seen[sign.rank] = (sign.time, since)
        age = time.monotonic() - since
        health, alive = sign.state, lives(sign)
        if health == "running" and (alive is False or (alive is None and age > SILENT)):
            health = "silent" if alive is None else "dead"
        step_age = age + max(0.0, sign.time - sign.step_time)
        return RankHealth(
            sign.rank, sign.host, health, sign.step, round(step_age, 1), round(age, 1), sign.rss, sign.error
        )

    def _steps(self) -> int:
        try:
            table = tomllib.loads(read_bytes(self.run / "config.toml", MEGABYTE).decode())
            steps = table["train"]["steps"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return 0
        return steps if type(steps) is int and 0 < steps < 1 << 31 else 0


class _GrowingFile:
    """A file to which lines are appended, and that may be replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._rest = b""

    def replaced(self) -> bool:
        """Return whether the file is another one than before, or shorter; `lines` then begins again."""
        try:
            status = os.stat(self._path)
            identity, size = (status.st_dev, status.st_ino), status.st_size
        except OSError:
            identity, size = None, 0
        if identity == self._identity and size >= self._offset:
            return False
        changed = self._identity is not None
        self._identity, self._offset, self._rest = identity, 0, b""
        return changed

    def lines(self) -> Iterator[bytes]:
        """Yield complete lines that were not there at the last call."""
        try:
            descriptor = open_regular(self._path)
        except OSError:
            return
        try:
            data = os.pread(descriptor, _READ_AT_ONCE, self._offset)
        except OSError:
            return
        finally:
            os.close(descriptor)
        self._offset += len(data)
        *complete, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) < _READ_AT_ONCE else b""  # that is not a line
        yield from complete


def _rows(lines: Iterator[bytes]) -> list[Row]:
    """Parse lines of metrics; those that are no such lines, or have numbers that are not finite, lose these."""
    rows: list[Row] = []
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or row.get("kind") not in _KINDS:
            continue
        if type(row.get("step")) is int:
            rows.append({name: value for name, value in row.items() if _is_plain(value)})
    return rows


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return len(value) < 1 << 16 and all(finite(each) is not None for each in value)
    return isinstance(value, str) or finite(value) is not None


def _spaced(rows: list[Row]) -> list[Row]:
    """Return all rows, or of too many, evenly spaced ones with the first and the last."""
    count = len(rows)
    if count <= MAX_ROWS:
        return rows
    return [rows[round(n * (count - 1) / (MAX_ROWS - 1))] for n in range(MAX_ROWS)]


def _judge(ranks: list[RankHealth], rows: list[Row]) -> tuple[str, str]:
    """Return the state of the run, and a sentence about it.

    The states are ``waiting`` (nothing there yet), ``running``, ``silent``, ``dead``, ``failed``, ``stopped``, ``done``, and
    ``unknown`` for runs without signs of life.
    """
    final = bool(rows) and rows[-1]["kind"] == "final"
    if not ranks:
        if final:
            return "done", "The run is finished."
        if rows:
            return "unknown", "The run gives no signs of life: an older version of Penstock made it."
        return "waiting", "The run has not begun. This page waits for it."
    by_health: dict[str, list[RankHealth]] = {}
    for one in ranks:
        by_health.setdefault(one.health, []).append(one)
    if failed := by_health.get("failed"):
        # The first to fail is the cause; the others followed.
        first = max(failed, key=lambda one: one.age)
        return "failed", f"Rank {first.rank} failed: {first.error}"
    if dead := by_health.get("dead"):
        if final:
            return "done", "The run is finished."
        ranks_text = _named(dead)
        return (
            "dead",
            f"{ranks_text} ended without a word: killed, or out of memory. The log has the last lines.",
        )
    if silent := by_health.get("silent"):
        oldest = max(one.age for one in silent)
        return "silent", f"No heartbeat from {_named(silent).lower()} for {oldest:.0f} s."
    if "stopped" in by_health:
        return "stopped", f"The run {by_health['stopped'][0].error}."
    if "running" in by_health:
        return ("running", "The run writes its last files.") if final else ("running", "")
    return "done", "The run is finished."


def _named(ranks: list[RankHealth]) -> str:
    numbers = ", ".join(str(one.rank) for one in ranks[:8]) + (" ..." if len(ranks) > 8 else "")
    return f"Rank{'s' if len(ranks) > 1 else ''} {numbers}"
