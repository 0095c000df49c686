"""The files of a recording: one for each process, a line of JSON for each tensor."""

from __future__ import annotations

import json
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.base.errors import ConfigError, DataError
from penstock.base.tensor_file import TensorFile, write_tensors
from penstock.base.version import __version__
from penstock.recordings.fingerprint import GROUPS, VECTORS, Fingerprint, joined

FORMAT = 1
LIMIT = 1 << 30
"""Bytes of a process's file at which its recording ends."""
CALLS = 1000
"""Numbers of calls that each layer of a pipeline has: a reader counts a module's calls of all its layers."""
_LONGEST_LINE = 1 << 22
_MOST_DIMS, _MOST_FILES = 64, 100_000


class Kind(IntEnum):
    """Kind of a recorded tensor, in the order in which a step makes them."""

    OUTPUT = 0
    """Output of a module."""
    OUTPUT_GRADIENT = 1
    """Gradient of a module's output."""
    SHARE = 2
    """Gradient that one microbatch's backward gives a parameter."""
    GRADIENT = 3
    """Gradient of a parameter as the optimizer sees it."""
    PARAMETER = 4
    """Parameter after the update."""
    BUFFER = 5
    """Buffer of a module after the update."""

    @property
    def words(self) -> str:
        """Words for a message."""
        return {
            Kind.OUTPUT: "output",
            Kind.OUTPUT_GRADIENT: "gradient of its output",
            Kind.SHARE: "gradient from this microbatch",
            Kind.GRADIENT: "gradient as the optimizer sees it",
            Kind.PARAMETER: "value after the update",
            Kind.BUFFER: "buffer after the step",
        }[self]

    @property
    def plural(self) -> str:
        """Word for several, in a count."""
        return {
            Kind.OUTPUT: "outputs",
            Kind.OUTPUT_GRADIENT: "gradients of outputs",
            Kind.SHARE: "gradients from a microbatch",
            Kind.GRADIENT: "gradients of parameters",
            Kind.PARAMETER: "updated parameters",
            Kind.BUFFER: "buffers",
        }[self]


@dataclass(frozen=True)
class Key:
    """Place of a tensor in a run.

    Attributes:
        step: number of the optimizer step, from 0; -1 for parameters and buffers before the first.
        microbatch: number within the step's batch, from 0; -1 where all of them have their part in it.
        name: name of the module, parameter or buffer in the whole model.
        call: number of the module's call within the microbatch, from 0.
        slot: number among the tensors that the call returned, from 0.
    """

    step: int
    kind: Kind
    microbatch: int
    name: str
    call: int = 0
    slot: int = 0

    def __str__(self) -> str:
        if self.step < 0:
            return f"before the first step: {self.name}, its value"
        microbatch = f", microbatch {self.microbatch}" if self.microbatch >= 0 else ""
        return f"step {self.step}{microbatch}: {self.place}"

    @property
    def place(self) -> str:
        """Module or parameter, and kind, in words."""
        call = f", call {self.call + 1}" if self.call else ""
        slot = f", tensor {self.slot + 1}" if self.slot else ""
        return f"{self.name or 'the model'}{call}{slot}, {self.kind.words}"


@dataclass(frozen=True)
class Entry:
    """A recorded tensor.

    Attributes:
        order: number of the entry in its process, in the order in which the process made them.
        process: rank of the process.
        values: file with the tensor itself; None if only its sums were recorded.
    """

    key: Key
    order: int
    process: int
    of: Fingerprint
    values: Path | None = None


class Writer:
    """Writer of one process's file.

    Args:
        folder: folder of the recording; made if it is not there.
        process: rank of this process among all of the run.
        processes: number of these.
        aliases: further names of modules that the model has in several places → the first name.

    Raises:
        ConfigError: if the folder has this process's part of a recording already.
    """

    def __init__(self, folder: Path, process: int, processes: int, aliases: Mapping[str, str]) -> None:
        self.path = folder / f"process-{process:05d}.jsonl"
        self._lock = threading.Lock()
        self._order = self._bytes = 0
        self._full = False
        if self.path.exists():
            raise ConfigError(
                f"{folder} has a recording of process {process} already; give another folder, or delete it"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("x", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write a recording into {folder}: {error.strerror}") from error
        head = {"recording": FORMAT, "penstock": __version__, "process": process, "processes": processes}
        self._line({**head, "aliases": dict(aliases)})

    @property
    def entries(self) -> int:
        """Number of tensors that were written."""
        return self._order

    @property
    def closed(self) -> bool:
        """True once the file has ended."""
        return self._file.closed

    def write(self, key: Key, of: Fingerprint, values: Tensor | None = None) -> None:
        """Append a tensor; any thread may call it.

        Args:
            values: the tensor itself, if it is to be kept, too.
        """
        table = {
            "at": [key.step, int(key.kind), key.microbatch, key.name, key.call, key.slot],
            "dtype": of.dtype,
            "shape": of.shape,
            **({} if of.whole else {"start": of.start, "size": of.size}),
            "digest": of.digest,
            "squares": of.squares,
            **({"nonfinite": of.nonfinite} if of.nonfinite else {}),
            "projections": None if of.nonfinite else of.projections,
            **({} if of.nonfinite else {"rows": of.rows, "columns": of.columns}),
        }
        with self._lock:
            if values is not None and self._has_room(values.nbytes):
                path = _values_of(self.path, self._order)
                table["values"] = self._try(lambda: _write_values(path, values))
            self._line({"order": self._order, **table})
            self._order += 1

    def _line(self, table: Mapping[str, Any]) -> None:
        text = json.dumps(table, separators=(",", ":")) + "\n"
        if self._has_room(len(text)):
            self._try(lambda: self._file.write(text))

    def _try(self, write: Callable[[], object]) -> bool:
        """Write; if the disk refuses, end the recording with a warning, and let the training continue."""
        try:
            write()
        except OSError as error:
            self._full = True
            warnings.warn(
                f"the recording {self.path} ends here, since it cannot be written: {error.strerror or error}; make room, "
                "record fewer steps or keep fewer tensors",
                RuntimeWarning,
                stacklevel=2,
            )
        return not self._full

    def _has_room(self, count: int) -> bool:
        """Return whether so many further bytes are to be written, and count them."""
        if self._file.closed or self._full:
            return False
        self._bytes += count
        self._full = self._bytes > LIMIT
        if self._full:
            warnings.warn(
                f"the recording {self.path} has {LIMIT:,} bytes and ends here; record fewer steps, or keep fewer tensors",
                RuntimeWarning,
                stacklevel=2,
            )
        return not self._full

    def close(self, complete: bool) -> None:
        """End the file; may be called twice.

        Args:
            complete: whether all that was to be recorded is; otherwise the reader says that it was cut off.
        """
        with self._lock:
            if self._file.closed:
                return
            if complete and not self._full:
                self._line({"end": self._order})
            self._try(self._flush)
            with suppress(OSError):  # told before; the file is closed in any case
                self._file.close()

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


@dataclass(frozen=True)
class Recording:
    """A recording that was read.

    Attributes:
        entries: all tensors and parts of tensors, by place, in the order of a process.
        cut_off: names of files that have no end: their process ended while it recorded, or records still.
        missing: names of files of other processes of the run that are not there.
    """

    folder: Path
    entries: dict[Key, list[Entry]]
    cut_off: list[str]
    missing: list[str]

    @cached_property
    def whole(self) -> dict[Key, Fingerprint]:
        """Sums over the tensors that are there as a whole, also in parts."""
        found = ((key, joined([entry.of for entry in of])) for key, of in self.entries.items())
        return {key: of for key, of in found if of is not None}

    @property
    def steps(self) -> list[int]:
        """Numbers of its steps."""
        return sorted({key.step for key in self.entries if key.step >= 0})


def _write_values(path: Path, values: Tensor) -> None:
    path.parent.mkdir(exist_ok=True)
    write_tensors(path, {"": values})


def _values_of(path: Path, order: int) -> Path:
    """Return the file with the values of a process's entry."""
    return path.with_suffix("") / f"{order:08d}.safetensors"


def kept_values(entries: Sequence[Entry]) -> Tensor | None:
    """Return the values of a tensor, if one entry has the whole; None if they were not kept.

    Raises:
        DataError: if the file is damaged or not there.
    """
    path = next((entry.values for entry in entries if entry.of.whole and entry.values is not None), None)
    if path is None:
        return None
    try:
        with TensorFile(path) as file:
            return file.read("")
    except (OSError, KeyError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def read(folder: str | os.PathLike[str]) -> Recording:
    """Read a recording.

    Raises:
        DataError: if the folder has none, or a file is damaged; nothing in a file can run code.
    """
    folder = Path(folder)
    if folder.is_file():
        raise DataError(f"{folder} is a file; give the folder that was recorded into")
    files = sorted(folder.glob("process-*.jsonl"))
    if not files:
        raise DataError(
            f"{folder} has no recording; make one with penstock.record({str(folder)!r}, model) around a training loop"
        )
    found: list[Entry] = []
    aliases: dict[str, str] = {}
    cut_off: list[str] = []
    names: set[str] = set()
    for path in files:
        process, complete = -1, False
        try:
            for number, table in _lines(path):
                if number == 1:
                    if table.get("recording") != FORMAT:
                        raise ValueError("its first line does not say that it is a recording of this version")
                    process = int(table["process"])
                    aliases |= table["aliases"]
                    names |= {
                        f"process-{n:05d}.jsonl" for n in range(min(int(table["processes"]), _MOST_FILES))
                    }
                elif "end" in table:
                    complete = True
                else:
                    entry = _entry(table, process)
                    kept = table.get("values") is True
                    found.append(replace(entry, values=_values_of(path, entry.order)) if kept else entry)
        except KeyError as error:
            raise DataError(f"{path} is damaged: a line has no {error}") from error
        except (OSError, ValueError, TypeError, IndexError, RecursionError) as error:
            raise DataError(f"{path} is damaged: {error}") from error
        if not complete:
            cut_off.append(path.name)
    missing = sorted(names - {path.name for path in files})
    return Recording(folder, _by_key(found, aliases), cut_off, missing)


def _by_key(found: Sequence[Entry], aliases: Mapping[str, str]) -> dict[Key, list[Entry]]:
    """Return entries by key, with the calls of each module numbered from 0 within a microbatch."""
    calls: dict[tuple[int, int, str], set[int]] = {}
    for entry in found:
        key = entry.key
        calls.setdefault((key.step, key.microbatch, aliases.get(key.name, key.name)), set()).add(key.call)
    numbers = {place: {call: n for n, call in enumerate(sorted(of))} for place, of in calls.items()}
    entries: dict[Key, list[Entry]] = {}
    for entry in found:
        name = aliases.get(entry.key.name, entry.key.name)
        call = numbers[entry.key.step, entry.key.microbatch, name][entry.key.call]
        key = replace(entry.key, name=name, call=call)
        entries.setdefault(key, []).append(replace(entry, key=key))
    return entries


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and content of each line; a last line that was not finished is left out."""
    with path.open(encoding="utf-8") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            if not line.endswith("\n"):
                if len(line) < _LONGEST_LINE:
                    return
                raise ValueError(f"line {number} is too long")
            table = json.loads(line)
            if not isinstance(table, dict):
                raise ValueError(f"line {number} is not an object")
            yield number, table


def _entry(table: Mapping[str, Any], process: int) -> Entry:
    step, kind, microbatch, name, call, slot = table["at"]
    if not isinstance(name, str) or not isinstance(table["dtype"], str):
        raise ValueError("a name is not text")
    shape = _whole_numbers(table["shape"])
    nonfinite = int(table.get("nonfinite", 0))
    projections = (math.nan,) * VECTORS if nonfinite else _numbers(table["projections"], VECTORS, VECTORS)
    return Entry(
        Key(int(step), Kind(kind), int(microbatch), name, int(call), int(slot)),
        int(table["order"]),
        process,
        Fingerprint(
            dtype=table["dtype"],
            shape=shape,
            start=_whole_numbers(table.get("start", (0,) * len(shape))),
            size=_whole_numbers(table.get("size", shape)),
            digest=int(table["digest"]),
            squares=float(table["squares"]),
            nonfinite=nonfinite,
            projections=projections,
            rows=_numbers(table.get("rows", ()), 0, GROUPS),
            columns=_numbers(table.get("columns", ()), 0, GROUPS),
        ),
    )


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if len(values) > _MOST_DIMS or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r:.60} are not sizes")
    return tuple(values)


def _numbers(values: Any, least: int, most: int) -> tuple[float, ...]:
    if not least <= len(values) <= most:
        raise ValueError(f"{len(values)} numbers in the place of {least} to {most}")
    return tuple(map(float, values))
