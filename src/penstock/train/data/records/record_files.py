"""Files of records, read one record after the other: JSON lines, Parquet, and folders that ``datasets`` saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.bounded_io import MEGABYTE, LongNumberError, open_regular, parse_json
from penstock.base.errors import ConfigError, DataError, nearest

DATASET_FILES = ("dataset_info.json", "dataset_dict.json")
"""Files that tell a folder of ``datasets``: a data set has the first, several splits have the second."""
_MAX_LINE = 256 * MEGABYTE
_ROWS = 256


@dataclass(frozen=True)
class Place:
    """A record's place: the number of a line or row of a file, from 1."""

    path: Path
    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.number:,}"


@dataclass(frozen=True)
class ReadRecord:
    """A record with its place, and the share of the file that has been read."""

    place: Place
    values: dict[str, Any]
    share: float


def read_records(path: Path, format: str, split: str) -> Iterator[ReadRecord]:
    """Yield the records of one file, or of one folder of ``datasets``.

    Args:
        path: path of the file or folder.
        format: ``jsonl``, ``parquet`` or ``datasets``.
        split: split to read, in a folder of ``datasets`` with several.

    Raises:
        DataError: if the file cannot be read, or a line is not a JSON object; names the line.
        ConfigError: if the library that reads the format is not installed, or there is no such split.
    """
    if format == "datasets":
        yield from _read_saved(path, split)
    else:
        yield from _read_lines(path) if format == "jsonl" else _read_parquet(path)


def _read_lines(path: Path) -> Iterator[ReadRecord]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = max(1, os.fstat(file.fileno()).st_size)
            number = read = 0
            while line := file.readline(_MAX_LINE):
                number, read = number + 1, read + len(line)
                place = Place(path, "line", number)
                if len(line) == _MAX_LINE:
                    raise DataError(f"{place}: the line has more than {_MAX_LINE:,} bytes")
                if line.strip():
                    yield ReadRecord(place, _parse_line(line, place), read / size)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _parse_line(line: bytes, place: Place) -> dict[str, Any]:
    try:
        record = parse_json(line.decode("utf-8-sig" if place.number == 1 else "utf-8"))
    except LongNumberError as error:
        raise DataError(f"{place}: {error}") from error
    except ValueError as error:  # also of the encoding
        raise DataError(f"{place} is not a JSON object: {error}{_hint(line, place)}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place} must be a JSON object, got {str(record)[:60]!r}{_hint(line, place)}")
    return record


def _hint(line: bytes, place: Place) -> str:
    """Return advice for a file whose first line shows that it is in another format."""
    if place.number > 1:
        return ""
    if line.startswith(b"\x1f\x8b"):
        return "; the file is packed by gzip: unpack it first"
    if line.lstrip().startswith((b"[", b"{")):
        return "; each line must be one object of its own (jq -c '.[]' FILE.json > FILE.jsonl)"
    return ""


def _read_parquet(path: Path) -> Iterator[ReadRecord]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs the pyarrow package: pip install 'penstock-torch[data]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            rows = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=_ROWS):
                for record in batch.to_pylist():
                    number += 1
                    yield ReadRecord(Place(path, "row", number), record, number / rows)
    except (OSError, ArrowException) as error:
        raise DataError(f"cannot read {path}, after row {number:,}: {error}") from error


def _read_saved(path: Path, split: str) -> Iterator[ReadRecord]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{path} needs the datasets package: pip install 'penstock-torch[data]'") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds
        raise DataError(f"cannot read the data set in {path}: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ConfigError(
                f"{path} has no split {split!r}{nearest(split, list(loaded))}; set data.split to one of {', '.join(loaded)}"
            )
        loaded = loaded[split]
    rows = max(1, len(loaded))
    for start in range(0, len(loaded), _ROWS):
        try:
            # Arrow's values: those of images and audio would be opened, wherever the data set says they are.
            records = loaded.with_format("arrow")[start : start + _ROWS].to_pylist()
        except Exception as error:
            raise DataError(f"cannot read the data set in {path}, after row {start:,}: {error}") from error
        for n, record in enumerate(records, start + 1):
            yield ReadRecord(Place(path, "row", n), record, n / rows)
