"""Traces: the events of one step with their times, recorded by the simulator and the executor alike.

Reports, comparisons and bubble analysis work on a Trace without knowing which of the two made it.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from penstock.base.atomic import open_replacing
from penstock.base.bounded_io import DAMAGED_ARRAY, MEGABYTE, require_regular
from penstock.base.counts import is_count
from penstock.base.errors import DataError

FORMAT = 1
API = "api"
"""Name in a trace's `info` of the API that a run used: "train", "Trainer" or "Pipeline"."""
COLUMNS = ("rank", "stage", "kind", "microbatch", "start", "end", "paired")
# Raised by numpy, zipfile and zlib for a file that is cut off or altered; NotImplementedError by zipfile, for an unknown
# compression.
_DAMAGE = (OSError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error, *DAMAGED_ARRAY)
# A file may unpack to this many bytes, or to so many times its size: a reader allocates the size that a zip claims.
_SMALL, _MAX_RATIO = 256 * MEGABYTE, 200
# Ranks that a header may claim beyond its events: tables by rank are as large as it says.
_MAX_IDLE_RANKS = 1 << 16
_LETTERS = {"start": "iuf", "end": "iuf", "paired": "b"}


class Activity(IntEnum):
    """Kind of an event; the first five are the kinds of op, with the same numbers."""

    F = 0
    B = 1
    I = 2  # noqa: E741 - the field's letter for the input-gradient half
    W = 3
    R = 4
    SEND = 5
    RECV = 6
    REDUCE = 7
    OPTIMIZER = 8
    GATHER = 9


COLLECTIVES = (Activity.GATHER, Activity.REDUCE)
"""Kinds of events on a rank's link to other replicas, or to a store, which run beside its ops."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """Timed events of one step, as columns of equal length, sorted by rank and then by start.

    Attributes:
        ranks: number of ranks.
        rank, stage, microbatch: int32; stage and microbatch are -1 where they have no meaning.
        kind: int8, an `Activity`.
        start, end: seconds from the start of the step (integer ticks in an integer simulation).
        paired: bool, whether the event and the next are the halves of one fused pair and span the same time.
        held: int64, bytes (or chunks) of activations the rank holds right after the event; None if unknown.
        info: further facts: ``source`` ("simulated" or "measured"), ``schedule``, ...
    """

    ranks: int
    rank: npt.NDArray[np.int32]
    stage: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    microbatch: npt.NDArray[np.int32]
    start: npt.NDArray[Any]
    end: npt.NDArray[Any]
    paired: npt.NDArray[np.bool_]
    held: npt.NDArray[np.int64] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, name)) for name in COLUMNS}
        lengths |= set() if self.held is None else {len(self.held)}
        if len(lengths) > 1:
            raise DataError(f"the columns of a trace must be of one length, got {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.rank)

    def select(self, rows: npt.NDArray[Any] | slice) -> Trace:
        """Return the events in some rows (a mask, indices or a slice), in their order."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        held = None if self.held is None else self.held[rows]
        return Trace(ranks=self.ranks, **columns, held=held, info=self.info)

    def only(self, kinds: Iterable[Activity]) -> Trace:
        """Return the events of some kinds; the trace itself if it has no event of another kind."""
        mask = np.zeros(len(self), np.bool_)
        for kind in kinds:
            mask |= self.kind == kind
        return self if mask.all() else self.select(mask)

    def rank_slices(self) -> list[slice]:
        """Return the rows of every rank as slices."""
        # With the column's dtype, so that the column is not converted.
        cuts = np.searchsorted(self.rank, np.arange(self.ranks + 1, dtype=self.rank.dtype)).tolist()
        return [slice(a, b) for a, b in pairwise(cuts)]

    def save(self, path: str | Path) -> None:
        """Write the trace to a path as a compressed ``.npz`` file; JSON must be able to represent `info`.

        Raises:
            DataError: if the file cannot be written.
        """
        columns = {name: getattr(self, name) for name in COLUMNS}
        if self.held is not None:
            columns["held"] = self.held
        header = {"format": FORMAT, "ranks": self.ranks, "info": dict(self.info)}
        try:
            with open_replacing(path) as file:
                np.savez_compressed(file, header=np.array(json.dumps(header)), **columns)
        except OSError as error:
            raise DataError(f"cannot write the trace {path}: {error}") from error

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a trace from the path of a file that `save` wrote. Nothing in the file is executed.

        Raises:
            DataError: if the file cannot be read, or is not a trace.
        """
        try:
            # Opened here, so that a damaged file is closed as well.
            require_regular(path)
            with open(path, "rb") as raw, np.load(_bounded(raw), allow_pickle=False) as file:
                header = json.loads(str(file["header"]))
                columns = {name: file[name] for name in COLUMNS}
                held = file["held"] if "held" in file.files else None
            if not all(
                isinstance(column, np.ndarray) for column in (*columns.values(), held) if column is not None
            ):
                raise ValueError("a column is not an array")
            form, ranks, info = header["format"], header["ranks"], header["info"]
        except _DAMAGE as error:
            raise DataError(f"cannot read {path} as a trace: {error}") from error
        if form != FORMAT:
            raise DataError(f"{path} is a trace of format {form}; this version reads format {FORMAT}")
        problem = _problem(ranks, info, {**columns, **({} if held is None else {"held": held})})
        if problem:
            raise DataError(f"{path} is not a valid trace: {problem}")
        return Trace(ranks=ranks, **columns, held=held, info=info)


def with_events(trace: Trace, rows: Sequence[tuple[int, int, Activity, Any, Any]]) -> Trace:
    """Return a trace with more events, given as (rank, stage, kind, start, end), that do not change what the rank holds."""
    if not rows:
        return trace
    rank, stage, kind, start, end = (np.array(column) for column in zip(*rows, strict=True))
    old = np.arange(len(trace) + len(rows)) < len(trace)
    merged = replace(
        trace,
        rank=np.concatenate([trace.rank, rank.astype(np.int32)]),
        stage=np.concatenate([trace.stage, stage.astype(np.int32)]),
        kind=np.concatenate([trace.kind, kind.astype(np.int8)]),
        microbatch=np.concatenate([trace.microbatch, np.full(len(rows), -1, np.int32)]),
        start=np.concatenate([trace.start, start]),
        end=np.concatenate([trace.end, end]),
        paired=np.concatenate([trace.paired, np.zeros(len(rows), np.bool_)]),
        held=None if trace.held is None else np.concatenate([trace.held, np.zeros(len(rows), np.int64)]),
    )
    order = np.lexsort((merged.start, merged.rank))
    merged = merged.select(order)
    if merged.held is None:
        return merged
    # What the rank's event before it left; 0 before the first.
    before = np.maximum.accumulate(np.where(old[order], np.arange(len(order)), -1))
    held = np.where(merged.rank[before] == merged.rank, merged.held[before], 0)
    return replace(merged, held=np.where(before < 0, 0, held))


def _bounded(file: BinaryIO) -> BinaryIO:
    """Return the file, rewound, after checking that it does not unpack to far more than its size."""
    size = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > max(_SMALL, _MAX_RATIO * size):
        raise ValueError(f"its {size:,} bytes unpack to {unpacked:,}")
    file.seek(0)
    return file


def _problem(ranks: object, info: object, columns: Mapping[str, npt.NDArray[Any]]) -> str:
    """Describe the first content of a file that no trace can have; empty if it is valid."""
    if not is_count(ranks) or not isinstance(info, dict):
        return f"its header says {ranks!r} ranks"
    lengths = {len(column) if column.ndim == 1 else -1 for column in columns.values()}
    if len(lengths) > 1 or -1 in lengths:
        return "its columns are not of one length"
    if ranks > len(columns["rank"]) + _MAX_IDLE_RANKS:
        return f"its header says {ranks} ranks, of its {len(columns['rank'])} events"
    for name, column in columns.items():
        if column.dtype.kind not in _LETTERS.get(name, "i"):
            return f"its column {name} has type {column.dtype}"
    rank, kind, start, end = (columns[name] for name in ("rank", "kind", "start", "end"))
    if len(rank) and not (rank.min() >= 0 and rank.max() < ranks):
        return f"it has events on ranks {rank.min()}..{rank.max()} of 0..{ranks - 1}"
    if (np.diff(rank) < 0).any():
        return "its events are not sorted by rank"
    if len(kind) and not (kind.min() >= 0 and kind.max() < len(Activity)):
        return f"it has a kind of event that is not known: {kind.max()}"
    for name in ("stage", "microbatch"):
        column = columns[name]
        if len(column) and (column.min() < -1 or column[kind <= Activity.R].min(initial=0) < 0):
            return f"an event has the {name} {column.min()}"
    if not (np.isfinite(start) & np.isfinite(end) & (end >= start)).all():
        return "an event ends before it starts"
    paired = columns["paired"]
    first = np.flatnonzero(paired[:-1])
    halves = (rank[first] == rank[first + 1]) & (np.maximum(kind[first], kind[first + 1]) <= Activity.R)
    if paired.any() and (paired[-1] or paired[first + 1].any() or not halves.all()):
        return "a pair has no second half"
    return ""


def both_ways(trace: Trace) -> bool:
    """Return whether a gather and a reduction of a rank run at the same time, as copies from and to a store do."""
    for rows in trace.rank_slices():
        moved = trace.select(rows).only(COLLECTIVES)
        order = np.argsort(moved.start, kind="stable")
        if (moved.start[order][1:] < np.maximum.accumulate(moved.end[order])[:-1]).any():
            return True
    return False
