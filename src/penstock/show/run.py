"""A run's folder as what can be shown of it: traces, metrics and config, each as far as it can be read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.bounded_io import MEGABYTE, parse_json, read_bytes
from penstock.errors import ConfigError, DataError
from penstock.show.analysis import StepAnalysis
from penstock.show.report import write
from penstock.trace.events import Trace
from penstock.trace.folder import read_file, read_folder

_MOST = 512 * MEGABYTE


@dataclass(frozen=True)
class RunView:
    """What there is to show.

    Attributes:
        title: the name of the folder or file.
        traces: step → trace, ascending, at least one; a single file is step 0.
        settings: the resolved config's text; empty if there is none.
        metrics: the lines of ``metrics.jsonl``.
        problems: what could not be read, a sentence each, with the file.
    """

    title: str
    traces: Mapping[int, Trace]
    settings: str
    metrics: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...]

    @cached_property
    def steps(self) -> Mapping[int, StepAnalysis]:
        """The analysis of every step, which computes nothing before it is asked."""
        return {
            number: StepAnalysis(f"step {number}" if number else self.title, trace)
            for number, trace in self.traces.items()
        }

    def choose(self, step: int | None) -> int:
        """The step that was asked for; the last one if none was.

        Raises:
            ConfigError: there is no trace of it.
        """
        if step is None:
            return max(self.traces)
        if step not in self.traces:
            there = ", ".join(map(str, self.traces))
            raise ConfigError(f"{self.title} has no trace of step {step}; there are those of {there}")
        return step


def read_run(path: str | Path) -> RunView:
    """Read a run's folder, or a single trace file.

    Raises:
        DataError: there is no trace in it that can be read.
    """
    path = Path(path)
    if os.path.isfile(path):
        trace, lacks = read_file(path)
        return RunView(path.name, {0: trace}, "", (), lacks)
    if not os.path.isdir(path):
        raise DataError(f"{path} is neither a run's folder nor a trace file")
    found = read_folder(path)
    problems = list(found.problems)
    metrics = _metrics(path / "metrics.jsonl", problems)
    return RunView(
        path.resolve().name, found.steps, _settings(path / "config.toml", problems), metrics, tuple(problems)
    )


def write_report(run: RunView, path: str | Path, step: int | None = None) -> Path:
    """Write the page of a run, with all its steps or with one; `write` says what is raised."""
    steps = list(run.steps.values()) if step is None else [run.steps[run.choose(step)]]
    return write(
        path, steps, title=run.title, settings=run.settings, metrics=run.metrics, problems=run.problems
    )


def _settings(path: Path, problems: list[str]) -> str:
    try:
        return read_bytes(path, _MOST).decode("utf-8") if path.exists() else ""
    except (OSError, ValueError) as error:
        problems.append(f"cannot read {path}: {error}")
        return ""


def _metrics(path: Path, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    if not path.exists():
        return ()
    try:
        lines = read_bytes(path, _MOST).splitlines()
    except OSError as error:
        problems.append(f"cannot read {path}: {error.strerror}")
        return ()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            problems.append(f"{path}: line {number} is no JSON object, and is left out")
    return tuple(rows)
