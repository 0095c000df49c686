"""A run's traces on disk: ``traces/step-000010.npz``, or one part a process, ``traces/step-000010.rank-3.npz``.

Reading skips files that are broken, cut off or of another version, and ranks that are missing. It describes them next to
the traces that could be read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.base.errors import DataError
from penstock.trace.events import Trace
from penstock.trace.join import Alignment, join, present

FOLDER = "traces"
_MAX_CELLS, _MAX_CELLS_PER_EVENT = 1 << 22, 256  # enough to show a trace that lacks most of its ranks
_NAME = re.compile(r"step-(\d+)(?:\.rank-(\d+))?\.npz")


@dataclass(frozen=True)
class RunTraces:
    """Traces of a run."""

    steps: Mapping[int, Trace]  # step (from 1) → its trace, ascending; a missing rank has no events
    problems: tuple[str, ...]  # descriptions of unreadable files and missing ranks, one sentence each


def step_path(run: str | Path, step: int, rank: int | None = None) -> Path:
    """Return the path of a step's trace, or of the part of one process if `rank` is given."""
    part = "" if rank is None else f".rank-{rank}"
    return Path(run) / FOLDER / f"step-{step:06}{part}.npz"


def save_step(run: str | Path, step: int, trace: Trace, rank: int | None = None) -> Path:
    """Write the trace of a step into the run's folder, complete or not at all, and return its path.

    With `rank`, it is the part that one process recorded; its ``info["origin"]`` must be on a clock that all parts
    share.
    """
    path = step_path(run, step, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.save(path)
    except OSError as error:
        raise DataError(f"cannot write the trace {path}: {error.strerror}") from error
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
    files: dict[int, list[tuple[int, Path]]] = {}
    try:
        for path in sorted(folder.iterdir()):
            if match := _NAME.fullmatch(path.name):
                files.setdefault(int(match[1]), []).append((int(match[2] or -1), path))
    except OSError as error:
        raise DataError(f"{run} has no traces: cannot read {folder}: {error.strerror}") from error
    steps: dict[int, Trace] = {}
    problems: list[str] = []
    for step in sorted(files):
        trace = _read_step(run, step, sorted(files[step]), problems)
        if trace is not None:
            steps[step] = trace
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


def _read_step(
    run: str | Path, step: int, files: list[tuple[int, Path]], problems: list[str]
) -> Trace | None:
    complete = [path for rank, path in files if rank < 0]
    parts: list[Trace] = []
    for path in complete or [path for _, path in files]:
        try:
            parts.append(Trace.load(path))
        except DataError as error:
            problems.append(str(error))
    parts = [part for part in parts if len(part)]
    if not parts:
        return None
    try:
        trace = parts[0] if complete else join(parts, _clocks(parts))
        _require_dense(trace, "its trace")
    except DataError as error:
        problems.append(f"step {step}: {error}")
        return None
    if missing := _without(trace):
        name = complete[0] if complete else step_path(run, step).with_suffix(".rank-*.npz")
        problems.append(
            f"step {step} is shown without {missing}: {name} {'has' if complete else 'have'} nothing of it"
        )
    return trace


def _require_dense(trace: Trace, name: object) -> None:
    """Reject a few events that claim to be of a huge step, because tables of the step would be as huge."""
    stages, microbatches = int(trace.stage.max(initial=-1)) + 1, int(trace.microbatch.max(initial=-1)) + 1
    if stages * microbatches > _MAX_CELLS + _MAX_CELLS_PER_EVENT * len(trace):
        raise DataError(
            f"{name} has {len(trace)} events of {stages} stages and {microbatches} microbatches; those are far too few"
        )


def _clocks(parts: list[Trace]) -> Alignment | None:
    """Return the alignment from ``clock_offset`` and ``clock_error`` (seconds) if all parts have them."""
    import numpy as np

    offsets = [(part.info.get("clock_offset"), part.info.get("clock_error", 0.0)) for part in parts]
    if not all(isinstance(number, int | float) for pair in offsets for number in pair):
        return None
    table = np.array(offsets, np.float64)
    return Alignment(table[:, 0], table[:, 1])


def _without(trace: Trace) -> str:
    """Describe the ranks that have no events."""
    missing = sorted(set(range(trace.ranks)) - set(present(trace)))
    if not missing:
        return ""
    return f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} (of {trace.ranks})"
