"""A run's traces on disk: ``traces/step-000010.npz``, or a part a process, ``traces/step-000010.rank-3.npz``.

What is read is what can be read: a file that is broken, cut off or of another version, and a rank that is missing, are
problems in words beside the traces of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.atomic import replacing
from penstock.errors import DataError
from penstock.trace.clock import Alignment
from penstock.trace.events import Trace
from penstock.trace.join import join, present

FOLDER = "traces"
_CELLS, _SPARSE = 1 << 22, 256  # a trace that lacks most of its ranks can still be shown
_NAME = re.compile(r"step-(\d+)(?:\.rank-(\d+))?\.npz")


@dataclass(frozen=True)
class Found:
    """The traces of a run.

    Attributes:
        steps: step (from 1) → its trace, ascending; a rank that is missing has no events.
        problems: what could not be read or is missing, a sentence each, with the file.
    """

    steps: Mapping[int, Trace]
    problems: tuple[str, ...]


def step_path(run: str | Path, step: int, rank: int | None = None) -> Path:
    """Where the trace of a step is kept: all of it, or the part of the process with that rank."""
    part = "" if rank is None else f".rank-{rank}"
    return Path(run) / FOLDER / f"step-{step:06}{part}.npz"


def save_step(run: str | Path, step: int, trace: Trace, rank: int | None = None) -> Path:
    """Keep the trace of a step with its run, and return where; the file is there complete or not at all.

    Args:
        run: the run's folder.
        step: counted from 1.
        trace: all ranks' (then `rank` is not given), or what the process `rank` recorded; of a part ``info["origin"]``
            must be on a clock that all parts share.
        rank: of the process.

    Raises:
        DataError: it cannot be written.
    """
    path = step_path(run, step, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            trace.save(unfinished)
    except OSError as error:
        raise DataError(f"cannot write the trace {path}: {error.strerror}") from error
    return path


def drop_after(run: str | Path, step: int) -> None:
    """Delete the traces of later steps, which are going to be done anew; there may be none.

    Raises:
        OSError: one cannot be deleted.
    """
    for path in (Path(run) / FOLDER).glob("step-*.npz"):
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) > step:
            path.unlink()


def read_folder(run: str | Path) -> Found:
    """Read all traces of a run.

    Raises:
        DataError: the folder has no trace that can be read; the message says what there is.
    """
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
    return Found(steps, tuple(problems))


def read_file(path: str | Path) -> tuple[Trace, tuple[str, ...]]:
    """Read one file, and say which ranks it lacks.

    Raises:
        DataError: it cannot be read, or holds no event.
    """
    trace = Trace.load(path)
    if not len(trace):
        raise DataError(f"{path} holds no event")
    _require_dense(trace, path)
    missing = _without(trace)
    return trace, ((f"{path}: nothing of {missing}",) if missing else ())


def _read_step(
    run: str | Path, step: int, files: list[tuple[int, Path]], problems: list[str]
) -> Trace | None:
    whole = [path for rank, path in files if rank < 0]
    parts: list[Trace] = []
    for path in whole or [path for _, path in files]:
        try:
            parts.append(Trace.load(path))
        except DataError as error:
            problems.append(str(error))
    parts = [part for part in parts if len(part)]
    if not parts:
        return None
    try:
        trace = parts[0] if whole else join(parts, _clocks(parts))
        _require_dense(trace, "its trace")
    except DataError as error:
        problems.append(f"step {step}: {error}")
        return None
    if missing := _without(trace):
        name = whole[0] if whole else step_path(run, step).with_suffix(".rank-*.npz")
        problems.append(
            f"step {step} is shown without {missing}: {name} {'has' if whole else 'have'} nothing of it"
        )
    return trace


def _require_dense(trace: Trace, what: object) -> None:
    """Refuse a few events that say of themselves that they are of a huge step: tables of the step would be as huge.

    Raises:
        DataError: it is so.
    """
    stages, microbatches = int(trace.stage.max(initial=-1)) + 1, int(trace.microbatch.max(initial=-1)) + 1
    if stages * microbatches > _CELLS + _SPARSE * len(trace):
        raise DataError(
            f"{what} has {len(trace)} events of {stages} stages and {microbatches} microbatches; those are far too few"
        )


def _clocks(parts: list[Trace]) -> Alignment | None:
    """What the parts say of their clocks, if all of them do: ``clock_offset`` and ``clock_error``, in seconds."""
    import numpy as np

    said = [(part.info.get("clock_offset"), part.info.get("clock_error", 0.0)) for part in parts]
    if not all(isinstance(number, int | float) for pair in said for number in pair):
        return None
    table = np.array(said, np.float64)
    return Alignment(table[:, 0], table[:, 1])


def _without(trace: Trace) -> str:
    """The ranks that have no events, in words."""
    missing = sorted(set(range(trace.ranks)) - set(present(trace)))
    if not missing:
        return ""
    return f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} (of {trace.ranks})"
