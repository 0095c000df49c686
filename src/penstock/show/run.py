"""A run's folder as a page shows it: traces, metrics and config, as far as they can be read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.base.bounded_io import MEGABYTE, parse_json, read_bytes
from penstock.base.errors import ConfigError, DataError
from penstock.show.analysis import StepAnalysis
from penstock.show.report import write
from penstock.show.report_page import UNKNOWN, RunFacts, read_facts
from penstock.trace.events import Trace
from penstock.trace.folder import read_file, read_folder

_MAX_BYTES = 512 * MEGABYTE


@dataclass(frozen=True)
class RunView:
    """Everything in a run's folder that can be shown."""

    title: str
    traces: Mapping[int, Trace]  # step → trace, ascending, at least one; a single file is step 0
    settings: str  # resolved config; empty if there is none
    metrics: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...]
    facts: RunFacts = UNKNOWN

    @cached_property
    def steps(self) -> Mapping[int, StepAnalysis]:
        """The analysis of every step, which computes nothing until it is asked."""
        return {
            number: StepAnalysis(f"step {number}" if number else self.title, trace)
            for number, trace in self.traces.items()
        }

    def choose(self, step: int | None) -> int:
        """Return a step that has a trace; for None, the last one."""
        if step is None:
            return max(self.traces)
        if step not in self.traces:
            steps = ", ".join(map(str, self.traces))
            raise ConfigError(f"{self.title} has no trace of step {step}; traced steps: {steps}")
        return step


def read_run(path: str | Path) -> RunView:
    """Read a run's folder, or a single trace file."""
    path = Path(path)
    if os.path.isfile(path):
        trace, missing = read_file(path)
        return RunView(path.name, {0: trace}, "", (), missing)
    if not os.path.isdir(path):
        raise DataError(f"{path} is neither a run's folder nor a trace file")
    traces = read_folder(path)
    problems = list(traces.problems)
    metrics = _metrics(path / "metrics.jsonl", problems)
    settings = _settings(path / "config.toml", problems)
    facts = read_facts(path, settings, metrics, problems)
    return RunView(path.resolve().name, traces.steps, settings, metrics, tuple(problems), facts)


def write_report(
    run: RunView, path: str | Path, step: int | None = None, *, note: str = "", reload_seconds: int = 0
) -> Path:
    """Write the page of a run with all its steps, or with one; see `write`."""
    steps = list(run.steps.values()) if step is None else [run.steps[run.choose(step)]]
    return write(
        path,
        steps,
        title=run.title,
        settings=run.settings,
        metrics=run.metrics,
        problems=run.problems,
        facts=run.facts,
        note=note,
        reload_seconds=reload_seconds,
    )


def _settings(path: Path, problems: list[str]) -> str:
    try:
        return read_bytes(path, _MAX_BYTES).decode("utf-8") if path.exists() else ""
    except (OSError, ValueError) as error:
        problems.append(f"cannot read {path}: {error}")
        return ""


def _metrics(path: Path, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    if not path.exists():
        return ()
    try:
        lines = read_bytes(path, _MAX_BYTES).splitlines()
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
            problems.append(f"{path}: line {number} is not a JSON object and is left out")
    return tuple(rows)
