"""A run's traces on disk: ``traces/step-000010.npz``.

Reading skips files that are broken, cut off or of another version, and ranks that are missing. It describes them next to
the traces that could be read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.base.errors import DataError, os_errors_as
from penstock.trace.events import Trace
from penstock.trace.join import present

FOLDER = "traces"
_MAX_CELLS, _MAX_CELLS_PER_EVENT = 1 << 22, 256  # enough to show a trace that lacks most of its ranks
_NAME = re.compile(r"step-(\d+)\.npz")


@dataclass(frozen=True)
class RunTraces:
    """Traces of a run."""

    steps: Mapping[int, Trace]  # step (from 1) → its trace, ascending; a missing rank has no events
    problems: tuple[str, ...]  # descriptions of unreadable files and missing ranks, one sentence each


def step_path(run: str | Path, step: int) -> Path:
    """Return the path of a step's trace."""
    return Path(run) / FOLDER / f"step-{step:06}.npz"


def save_step(run: str | Path, step: int, trace: Trace) -> Path:
    """Write the trace of a step into the run's folder, complete or not at all, and return its path."""
    path = step_path(run, step)
    with os_errors_as(DataError, f"cannot write the trace {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.save(path)
    return path


def drop_after(run: str | Path, step: int) -> None:
    """Delete the traces of later steps, which will be run again."""
    for path in (Path(run) / FOLDER).glob("step-*.npz"):
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) > step:
            path.unlink()


def read_folder(run: str | Path) -> RunTraces:
    """Read all traces of a run."""
    folder = Path(run) / FOLDER
    with os_errors_as(DataError, f"{run} has no traces: cannot read {folder}"):
        files = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    steps: dict[int, Trace] = {}
    problems: list[str] = []
    for step, path in sorted(files.items()):
        try:
            steps[step], lacks = read_file(path)
        except DataError as error:
            problems.append(str(error))
        else:
            problems += lacks
    if not steps:
        raise DataError(
            "; ".join(problems)
            or f"{folder} holds no trace; the files of a run are called {step_path('', 10).name}"
        )
    return RunTraces(steps, tuple(problems))


def read_file(path: str | Path) -> tuple[Trace, tuple[str, ...]]:
    """Read one file; return its trace and a description of the ranks it lacks."""
    trace = Trace.load(path)
    if not len(trace):
        raise DataError(f"{path} holds no event")
    _require_dense(trace, path)
    missing = _without(trace)
    return trace, ((f"{path}: nothing of {missing}",) if missing else ())


def _require_dense(trace: Trace, name: object) -> None:
    """Reject a few events that claim to be of a huge step, because tables of the step would be as huge."""
    stages, microbatches = int(trace.stage.max(initial=-1)) + 1, int(trace.microbatch.max(initial=-1)) + 1
    if stages * microbatches > _MAX_CELLS + _MAX_CELLS_PER_EVENT * len(trace):
        raise DataError(
            f"{name} has {len(trace)} events of {stages} stages and {microbatches} microbatches; those are far too few"
        )


def _without(trace: Trace) -> str:
    """Describe the ranks that have no events."""
    missing = sorted(set(range(trace.ranks)) - set(present(trace)))
    if not missing:
        return ""
    return f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} (of {trace.ranks})"
