"""Tokenized files on disk: written once, whole or not at all, and read by position.

A store is a folder: ``tokens.npy`` (see `TokenFile` for why it is read and not mapped), for every record where its tokens
begin, where its first target is, how many bytes its trained text has, a hash of its tokens; and ``about.json``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from penstock.base.atomic import write_text
from penstock.base.bounded_io import DAMAGED_ARRAY, MEGABYTE, parse_json, read_bytes
from penstock.base.errors import DataError
from penstock.train.data.records.record_encoder import CONTEXT, EncodedRecord, FlaggedTokens
from penstock.train.data.token_file import TokenFile

VERSION = 2
_TOKENS, _ABOUT = "tokens.npy", "about.json"
_COLUMNS = {"starts": np.int64, "targets": np.uint32, "sizes": np.uint32, "hashes": np.uint64}


@dataclass(frozen=True)
class TokenizedFile:
    """A file of a store: its name, its number of records that are kept, and how many were empty or had no target."""

    name: str
    records: int
    empty: int
    untrained: int


@dataclass(frozen=True)
class ChosenRecords:
    """Some records of a store, one after the other, for a digest; see `penstock.train.data.digest.Digestible`.

    Attributes:
        store: the store.
        numbers: numbers of the records, ascending; int64, shape (n,).
    """

    store: RecordStore
    numbers: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self.numbers) else 0

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """Hash of each record's tokens; shape (n,)."""
        hashes: npt.NDArray[np.uint64] = self.store.hashes[self.numbers]
        return hashes

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.store.lengths()[self.numbers])

    def listing(self) -> list[tuple[str, int, str]]:
        listing, first = [], 0
        for file in self.store.files:
            here = slice(*np.searchsorted(self.numbers, (first, first + file.records)))
            tokens = int(self.store.lengths()[self.numbers[here]].sum())
            listing.append((file.name, tokens, f"{self.store.kind}:{here.stop - here.start}:{tokens}"))
            first += file.records
        return listing

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        pieces = []
        while length:
            n = int(np.searchsorted(self._ends, start, side="right"))
            take = min(length, int(self._ends[n]) - start)
            record = int(self.numbers[n])
            pieces.append(
                self.store.read(int(self.store.starts[record + 1]) - (int(self._ends[n]) - start), take)
            )
            start, length = start + take, length - take
        tokens: npt.NDArray[np.int64] = np.concatenate(pieces).astype(np.int64)
        return tokens


EncodedFile = tuple[str, Iterable[Sequence[EncodedRecord]]]
"""Name of a file, and its encoded records in batches."""


class RecordStore:
    """The records of one source.

    Args:
        folder: folder of the store.
        keep: owner of a temporary folder, which must live as long as the store (default none).

    Attributes:
        folder: folder of the store.
        files: the files, in order.
        kind: kind of the records.
        starts: position of each record's first token, and the end of the last; int64, shape (records + 1,).
        targets: index of each record's first token that is trained on; shape (records,).
        sizes: bytes of each record's trained text; shape (records,).
        hashes: hash of each record's tokens; uint64, shape (records,).

    Raises:
        DataError: if the store is damaged.
    """

    def __init__(self, folder: Path, keep: object = None) -> None:
        self.folder = folder
        self._keep = keep
        try:
            about: dict[str, Any] = parse_json(read_bytes(folder / _ABOUT, 256 * MEGABYTE))
            self.files = tuple(TokenizedFile(**entry) for entry in about["files"])
            self.kind = str(about["kind"])
            self.starts, self.targets, self.sizes, self.hashes = (
                np.load(folder / f"{name}.npy", allow_pickle=False) for name in _COLUMNS
            )
        except (OSError, *DAMAGED_ARRAY) as error:
            raise DataError(
                f"the tokenized data in {folder} is damaged: {error}; delete that folder"
            ) from error
        self._tokens = TokenFile(folder / _TOKENS)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each record."""
        lengths: npt.NDArray[np.int64] = np.diff(self.starts)
        return lengths

    def read(self, start: int, length: int) -> FlaggedTokens:
        """Return stored tokens start..start+length-1; shape (length,).

        Raises:
            DataError: if they cannot be read.
        """
        return self._tokens[start : start + length].astype(np.uint32, copy=False)


def make_store(
    cache: Path,
    key: str,
    files: Callable[[], Iterable[EncodedFile]],
    kind: Callable[[], str | None],
    keep: object = None,
) -> RecordStore:
    """Return the store of a key, and write it first if there is none.

    Of several processes that ask for it, one writes while the others wait, where the file system has locks.

    Args:
        cache: folder of stores.
        key: name of the store, which differs if anything differs that its tokens depend on.
        files: function that returns the files with their encoded records.
        kind: function that returns the kind of the records, once they are encoded; of ``files``, every piece is kept.
        keep: owner of a temporary folder (default none).

    Raises:
        DataError: if the records cannot be read, the store cannot be written, or it is damaged.
    """
    folder = cache / key
    if folder.is_dir():  # it is complete, and its cache may be read-only
        return RecordStore(folder, keep)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{key}.lock"):
            if not folder.is_dir():
                _write(folder, files(), kind)
    except OSError as error:
        raise DataError(
            f"cannot write the tokenized data to {folder}: {error.strerror or error}; set data.cache to another folder"
        ) from error
    return RecordStore(folder, keep)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # Without locks in this file system, each process writes its own store, and the last one replaces the others.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _write(folder: Path, files: Iterable[EncodedFile], kind: Callable[[], str | None]) -> None:
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        with (unfinished / _TOKENS).open("xb") as file:
            writer = _Writer(file, kind)
            stored = [writer.add(name, batches) for name, batches in files]
            writer.finish(unfinished)
        about = {"version": VERSION, "kind": kind() or "text", "files": [asdict(entry) for entry in stored]}
        write_text(unfinished / _ABOUT, json.dumps(about))
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class _Writer:
    """Writer of a store's tokens and columns."""

    def __init__(self, file: BinaryIO, kind: Callable[[], str | None]) -> None:
        self._file = file
        self._kind = kind
        self._header(0)
        self._body = file.tell()
        self._columns = {name: array("q" if name == "starts" else "Q") for name in _COLUMNS}
        self._columns["starts"].append(0)

    def _header(self, tokens: int) -> None:
        # NumPy leaves room in a header for a larger shape.
        header = {"descr": "<u4", "fortran_order": False, "shape": (tokens,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def add(self, name: str, batches: Iterable[Sequence[EncodedRecord]]) -> TokenizedFile:
        records = empty = untrained = 0
        columns = self._columns
        for batch in batches:
            for record in batch:
                trained = np.flatnonzero(record.tokens[1:] < CONTEXT)
                if not len(record.tokens):
                    empty += 1
                elif not len(trained) and self._kind() != "files":
                    untrained += 1
                else:
                    data = record.tokens.astype("<u4").tobytes()
                    self._file.write(data)
                    records += 1
                    columns["starts"].append(columns["starts"][-1] + len(record.tokens))
                    columns["targets"].append(int(trained[0]) + 1 if len(trained) else 0)
                    columns["sizes"].append(record.trained_bytes)
                    digest = hashlib.blake2b(data, digest_size=8).digest()
                    columns["hashes"].append(int.from_bytes(digest, "little"))
        return TokenizedFile(name, records, empty, untrained)

    def finish(self, folder: Path) -> None:
        for name, dtype in _COLUMNS.items():
            np.save(folder / f"{name}.npy", np.array(self._columns[name], dtype))
        self._file.seek(0)
        self._header(self._columns["starts"][-1])
        assert self._file.tell() == self._body, "the header has kept its size"
