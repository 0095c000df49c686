"""Files as one long sequence of tokens.

The tokens of a text file are its bytes and a 0 that marks its end; the tokens of a ``.npy`` file are its integers. With a
tokenizer, text is encoded when it is opened, and its tokens are in memory.

Files of tokens are read by position with ordinary reads. They are not memory-mapped on purpose. If a mapped file has been
truncated, the rest of its last page reads as zeros, and the first access to a page beyond it (or to one that the disk
cannot deliver) ends the process with SIGBUS, which Python cannot catch. A read of the same range returns fewer bytes or an
error, and both can be reported. Only the requested range is in memory; the system caches the pages it has read.
"""

from __future__ import annotations

import hashlib
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.base.bounded_io import DAMAGED_ARRAY, open_regular
from penstock.base.errors import DataError, os_errors_as
from penstock.train.config.sections import DataConfig
from penstock.train.data.file_formats import DataFiles
from penstock.train.data.text_tokens import Watch, tokens_of_dataset, tokens_of_files
from penstock.train.data.tokenizer import END, HFTokenizer, Tokenizer

_OPEN_FILES = 256
_HEADER = 1 << 16  # bytes; numpy refuses headers of more than 10,000 characters


class TokenFile:
    """The tokens of one file: the integers of a ``.npy`` file, or the bytes of any other; `len` counts them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with os_errors_as(DataError, f"cannot read {path}"):
            self._descriptor = open_regular(path)
            weakref.finalize(self, os.close, self._descriptor).atexit = False
            self._dtype: np.dtype[np.generic] = np.dtype(np.uint8)
            self._first, self._count = 0, os.fstat(self._descriptor).st_size
            if path.suffix == ".npy":
                self._first, self._count, self._dtype = self._array(self._count)

    def _array(self, size: int) -> tuple[int, int, np.dtype[np.generic]]:
        """Return the offset of the first token in bytes, the number of tokens, and the dtype, from the header."""
        head = BytesIO(os.pread(self._descriptor, _HEADER, 0))
        try:
            version = np.lib.format.read_magic(head)
            if version not in _HEADERS:
                raise ValueError(f"it has version {version} of the format; write it with numpy.save")
            shape, _, dtype = _HEADERS[version](head)
            if dtype.hasobject:
                raise ValueError("it holds Python objects")
            if any(length < 0 for length in shape):
                raise ValueError(f"its header says that its shape is {shape}")
        except DAMAGED_ARRAY as error:
            raise DataError(f"{self.path} is not a numpy token file: {error}") from error
        if len(shape) != 1 or dtype.kind not in "iu":
            raise DataError(
                f"{self.path} holds {dtype} of shape {shape}; tokens are one dimension of integers"
            )
        if head.tell() + math.prod(shape) * dtype.itemsize > size:
            raise DataError(
                f"{self.path} is not a numpy token file: it is cut short, its header says {shape}"
            )
        return head.tell(), shape[0], dtype

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, tokens: slice) -> npt.NDArray[np.generic]:
        """Return tokens start..stop-1 of the file, in its dtype, shape (stop - start,)."""
        start, stop, _ = tokens.indices(self._count)
        at, end = (self._first + n * self._dtype.itemsize for n in (start, max(start, stop)))
        pieces: list[bytes] = []
        with os_errors_as(DataError, f"cannot read {self.path}"):
            # A read may return fewer bytes than requested, and returns none only at the file's end.
            while at < end and (piece := os.pread(self._descriptor, end - at, at)):
                pieces.append(piece)
                at += len(piece)
        if at < end:
            raise DataError(f"{self.path} became shorter while it was being read")
        return np.frombuffer(b"".join(pieces), self._dtype)


_HEADERS: dict[tuple[int, int], Callable[[BytesIO], tuple[tuple[int, ...], bool, np.dtype[np.generic]]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def token_files() -> Callable[[Path], TokenFile]:
    """Return a function from a path to its `TokenFile`; the last 256 stay open."""
    return lru_cache(maxsize=_OPEN_FILES)(TokenFile)


Tokens = npt.NDArray[np.int64]


class StoredTokens(Protocol):
    """Tokens of one file: `len` counts them, and a slice reads some."""

    def __len__(self) -> int: ...

    def __getitem__(self, tokens: slice) -> npt.NDArray[np.generic]: ...


TokensOf = Callable[[Path], StoredTokens]

# Tokens of a chunk, which is all of a corpus that a count over it holds in memory.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Document:
    """A file, or one end of it.

    Attributes:
        start, stop: range of the file's tokens, without the end mark.
    """

    path: Path
    start: int
    stop: int
    end_mark: int

    def __len__(self) -> int:
        return self.stop - self.start + self.end_mark


class Corpus:
    """Documents one after the other, addressed by the position of a token.

    Attributes:
        offsets: position where each document starts, and the total; int64, shape (documents + 1,).
    """

    def __init__(
        self,
        documents: Sequence[Document],
        tokens_of: TokensOf | None = None,
        end: int = END,
        files: DataFiles | None = None,
    ) -> None:
        self.documents = tuple(documents)
        self._tokens_of = tokens_of or token_files()
        self._end = end
        self._files = files
        self.offsets = np.zeros(len(self.documents) + 1, np.int64)
        np.cumsum([len(document) for document in self.documents], out=self.offsets[1:])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def of(self, documents: Iterable[Document]) -> Corpus:
        """Return a corpus of some of the documents."""
        return Corpus(tuple(documents), self._tokens_of, self._end, self._files)

    def listing(self) -> list[tuple[str, int, str]]:
        """Return name, number of tokens and range of every document."""
        return [
            (
                document.path.name if self._files is None else self._files.name_of(document.path),
                len(document),
                f"{document.start}:{document.stop}:{document.end_mark}",
            )
            for document in self.documents
        ]

    def read(self, start: int, length: int) -> Tokens:
        """Return tokens start..start+length-1, int64 of shape (length,)."""
        out = np.full(length, self._end, np.int64)
        at, filled = int(np.searchsorted(self.offsets, start, side="right")) - 1, 0
        while filled < length:
            document = self.documents[at]
            skip = start + filled - int(self.offsets[at])
            take = min(len(document) - skip, length - filled)
            # Where the end mark falls into the range, the end token already in `out` stays.
            stored = min(take, document.stop - document.start - skip)
            if stored > 0:
                first = document.start + skip
                tokens = self._tokens_of(document.path)[first : first + stored]
                if len(tokens) != stored:
                    raise DataError(f"{document.path} became shorter while it was being read")
                out[filled : filled + stored] = tokens
            filled += take
            at += 1
        return out

    def chunks(self) -> Iterator[Tokens]:
        """Yield all tokens in chunks of at most 2^20; each begins with the last token of the chunk before."""
        for start in range(0, max(len(self) - 1, 1), _CHUNK - 1):
            yield self.read(start, min(_CHUNK, len(self) - start))


def open_corpus(files: DataFiles, config: DataConfig, tokenizer: Tokenizer, watch: Watch) -> Corpus:
    """Return files as one corpus.

    Args:
        config: the ``[data]`` section, for the split and the column of a folder that ``datasets`` saved.
    """
    end: int | None = END
    tokens_of: TokensOf = token_files()
    marked = files.format != "datasets"
    if not marked:
        rows = {path: tokens_of_dataset(path, config, tokenizer, watch) for path in files.paths}
        tokens_of = rows.__getitem__
    elif isinstance(tokenizer, HFTokenizer):
        end = tokenizer.end
        texts = tokens_of_files([path for path in files.paths if path.suffix != ".npy"], tokenizer, watch)
        on_disk = token_files()

        def tokens_of(path: Path) -> StoredTokens:
            return texts[path] if path in texts else on_disk(path)

    documents = [
        Document(path, 0, tokens, 0 if path.suffix == ".npy" or not marked or end is None else 1)
        for path in files.paths
        if (tokens := len(tokens_of(path)))
    ]
    if not documents:
        raise DataError(
            f"every file in {files.root} is empty; data.path must name text, .npy token files, or a folder of `datasets`"
        )
    return Corpus(documents, tokens_of, END if end is None else end, files)


def divide(corpus: Corpus, files: DataFiles, held_out: float) -> tuple[Corpus, Corpus]:
    """Divide a corpus into a training and a held-out one.

    Of several files, those with the smallest hashes of their names (within the folder) are held out, so the division
    depends on nothing else. Of a single file, the end is held out.
    """
    documents = corpus.documents
    if len(documents) == 1:
        training, rest = _divide_one(documents[0], held_out)
        return corpus.of([training]), corpus.of([rest])
    count = min(max(1, round(held_out * len(documents))), len(documents) - 1)
    by_hash = sorted(documents, key=lambda document: _name_hash(document.path.relative_to(files.root)))
    held_out_paths = {document.path for document in by_hash[:count]}
    return (
        corpus.of(document for document in documents if document.path not in held_out_paths),
        corpus.of(document for document in documents if document.path in held_out_paths),
    )


def _divide_one(document: Document, share: float) -> tuple[Document, Document]:
    size = document.stop - document.start
    cut = document.start + size - max(1, round(share * size))
    return (
        Document(document.path, document.start, cut, 0),
        Document(document.path, cut, document.stop, document.end_mark),
    )


def _name_hash(name: Path) -> bytes:
    return hashlib.sha256(name.as_posix().encode("utf-8", "surrogateescape")).digest()
