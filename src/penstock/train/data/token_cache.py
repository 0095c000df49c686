"""Cache of tokenized files, keyed by a digest of all that their tokens depend on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from penstock.base.bounded_io import open_regular
from penstock.base.errors import DataError
from penstock.base.scratch import Scratch
from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.file_formats import DataFiles
from penstock.train.data.records.chat_template import TEMPLATE_FILES
from penstock.train.data.records.record_encoder import EncodedRecord, RecordEncoder
from penstock.train.data.records.record_files import ReadRecord, read_records
from penstock.train.data.records.record_store import VERSION, EncodedFile, RecordStore, make_store
from penstock.train.data.tokenizer import HFTokenizer, Tokenizer

Watch = Callable[[str, float], None]
"""Function that receives the name of a file that is being tokenized, and the share of all files that is done."""

# Files or records that are encoded together, by several threads.
_BATCH = 64
# A file is recognized by at most 64 pieces of 64 KiB, spread evenly, with its size and time of change.
_PIECES, _PIECE = 64, 1 << 16
_TEXT = 1 << 24
"""Bytes of a text that are encoded at once; a longer one is divided between lines."""


class TokenCache:
    """A folder of tokenized files.

    Args:
        folder: folder of the cache; None for a temporary one, which lives as long as this object.
    """

    def __init__(
        self,
        folder: Path | None,
        tokenizer: Tokenizer,
        source: Path | None,
        watch: Watch = lambda name, share: None,
    ) -> None:
        self._scratch = Scratch() if folder is None else None
        self._folder = folder if self._scratch is None else self._scratch.path
        self._tokenizer = tokenizer
        self._source = source
        self._watch = watch

    def records(self, files: DataFiles, config: DataConfig) -> RecordStore:
        encoder = RecordEncoder(config, self._tokenizer, self._source)
        fields = (
            "record",
            "text_field",
            "prompt_field",
            "completion_field",
            "messages_field",
            "split",
            "train_on",
        )
        names = [] if self._source is None else [self._source / name for name in TEMPLATE_FILES]
        key = self._key(
            files,
            [*(getattr(config, name) for name in fields), *(_identity(p) for p in names if p.is_file())],
        )

        def encoded() -> Iterator[EncodedFile]:
            for n, path in enumerate(files.paths):
                records = read_records(path, files.format, config.split)
                yield files.name_of(path), self._encode(records, encoder, n, len(files.paths))

        return self._store(key, encoded, lambda: encoder.kind)

    def texts(self, files: DataFiles, tokenizer: HFTokenizer) -> RecordStore:
        """Return the tokens of text files, of each in the pieces in which it was encoded."""

        def encoded() -> Iterator[EncodedFile]:
            paths = files.paths
            for start in range(0, len(paths), _BATCH):
                group = paths[start : start + _BATCH]
                self._watch(str(group[0]), start / len(paths))
                small = [path for path in group if path.stat().st_size <= _TEXT // _BATCH]
                texts = ["".join(_pieces(path)) for path in small]
                together = dict(zip(small, _encoded(texts, tokenizer), strict=True))  # by several threads
                for path in group:
                    one = [[together[path]]] if path in together else _encode_pieces(path, tokenizer)
                    yield files.name_of(path), one

        return self._store(self._key(files, ["files"]), encoded, lambda: "files")

    def _store(
        self, key: str, files: Callable[[], Iterable[EncodedFile]], kind: Callable[[], str | None]
    ) -> RecordStore:
        assert self._folder is not None
        return make_store(self._folder, key, files, kind, keep=self._scratch)

    def _encode(
        self, records: Iterator[ReadRecord], encoder: RecordEncoder, number: int, files: int
    ) -> Iterator[list[EncodedRecord]]:
        while batch := list(islice(records, _BATCH)):
            self._watch(str(batch[-1].place.path), (number + batch[-1].share) / files)
            yield encoder.encode(batch)

    def _key(self, files: DataFiles, others: Sequence[str]) -> str:
        tokenizer = self._tokenizer
        parts = [str(VERSION), files.format, *others]
        parts.append(tokenizer.digest if isinstance(tokenizer, HFTokenizer) else tokenizer.unit)
        for path in files.paths:
            inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
            parts += [f"{files.name_of(path)}:{_identity(p)}" for p in inside]
        return hashlib.blake2b(
            "\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=12
        ).hexdigest()


def _identity(path: Path) -> str:
    """Return a digest of a file's size, time of change and content; of a large file, of pieces spread evenly over it."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        descriptor = open_regular(path)
        try:
            status = os.fstat(descriptor)
            digest.update(f"{status.st_size}:{status.st_mtime_ns}".encode())
            last = max(0, status.st_size - _PIECE)
            count = min(_PIECES, -(-status.st_size // _PIECE))
            for n in range(count):
                digest.update(os.pread(descriptor, _PIECE, last * n // max(1, count - 1)))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def _encoded(texts: list[str], tokenizer: HFTokenizer) -> list[EncodedRecord]:
    sizes = [len(text.encode()) for text in texts]
    tokens = tokenizer.encode_batch(texts) if texts else []
    return [EncodedRecord(*pair) for pair in zip(tokens, sizes, strict=True)]


def _encode_pieces(path: Path, tokenizer: HFTokenizer) -> Iterator[list[EncodedRecord]]:
    for text in _pieces(path):
        yield _encoded([text], tokenizer)


def _pieces(path: Path) -> Iterator[str]:
    """Yield the text of a file in pieces of whole lines."""
    read = 0
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            while piece := file.read(_TEXT):
                piece += file.readline()
                yield piece.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
                read += len(piece)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise DataError(f"{path} does not fit into memory as one text; divide it") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error.reason} at byte {read + error.start}), which the tokenizer reads; data."
            "pattern chooses files"
        ) from error
