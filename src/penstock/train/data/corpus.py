"""Files as one long sequence of tokens, read from disk on demand.

The tokens of a text file are its bytes and a 0 that marks its end; those of a ``.npy`` file are its integers. With a
tokenizer, text is encoded once at the start, and its tokens stay in memory.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.bounded_io import require_regular
from penstock.errors import DataError
from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.token_file import TokenFile, token_files
from penstock.train.data.tokenizer import END, HFTokenizer

Tokens = npt.NDArray[np.int64]
TokensOf = Callable[[Path], TokenFile | npt.NDArray[np.generic]]

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_CHUNK = 1 << 20
_TEXTS_PER_BATCH = 64


@dataclass(frozen=True)
class Document:
    """A file, or one end of it.

    Attributes:
        path: path of the file.
        start, stop: range of the file's tokens, without the end mark.
        end_mark: 1 if an end token follows the last one, else 0.
    """

    path: Path
    start: int
    stop: int
    end_mark: int

    def __len__(self) -> int:
        return self.stop - self.start + self.end_mark


class Corpus:
    """Documents one after the other, addressed by the position of a token.

    Args:
        documents: the documents, in order.
        tokens_of: function from a path to the file's tokens, one dimension of integers (default: a `TokenFile`).
        end: end token (default 0).
        root: folder that the files' names are relative to; None for the names alone.

    Attributes:
        documents: the documents, in order.
        offsets: position where each document starts, and the total; int64, shape (documents + 1,).
    """

    def __init__(
        self,
        documents: Sequence[Document],
        tokens_of: TokensOf | None = None,
        end: int = END,
        root: Path | None = None,
    ) -> None:
        self.documents = tuple(documents)
        self._tokens_of = tokens_of or token_files()
        self._end = end
        self._root = root
        self.offsets = np.zeros(len(self.documents) + 1, np.int64)
        np.cumsum([len(document) for document in self.documents], out=self.offsets[1:])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def name_of(self, document: Document) -> str:
        """Return the file's name relative to the root; bytes that are no UTF-8 are written as ``\\xNN``."""
        path = document.path
        name = path.name if self._root in (None, path) else path.relative_to(self._root or "").as_posix()
        return os.fsencode(name).decode("utf-8", "backslashreplace")

    def read(self, start: int, length: int) -> Tokens:
        """Return tokens start..start+length-1, int64 of shape (length,).

        Raises:
            DataError: if a file can no longer be read, or is shorter than when the run began.
        """
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


def open_corpora(config: DataConfig, tokenizer: HFTokenizer | None = None) -> tuple[Corpus, Corpus]:
    """Find the files and divide them into a training and a held-out corpus.

    Of several files, those with the smallest hashes of their names (within the folder) are held out, so the division
    depends on nothing else. Of a single file, the end is held out.

    Args:
        config: the ``[data]`` section.
        tokenizer: tokenizer of text files; None where a text's tokens are its bytes.

    Returns:
        The training and the held-out corpus.

    Raises:
        DataError: if there are no files, or one cannot be read, is no list of tokens, or is in a format of records.
    """
    if config.path:
        root = Path(config.path).expanduser()
        paths = _files_below(root, config.pattern)
        _reject_records(paths)
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [p for p in _files_below(root, "*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts)]
    tokens_of: TokensOf = token_files() if tokenizer is None else _encode_texts(paths, tokenizer)
    end = END if tokenizer is None else tokenizer.end
    documents = [
        Document(path, 0, tokens, 0 if path.suffix == ".npy" or end is None else 1)
        for path in paths
        if (tokens := len(tokens_of(path)))
    ]
    if not documents:
        raise DataError(f"every file in {root} is empty; data.path must name text or .npy token files")

    def corpus(chosen: Iterable[Document]) -> Corpus:
        return Corpus(list(chosen), tokens_of, END if end is None else end, root)

    if len(documents) == 1:
        training, held_out = _divide_one(documents[0], config.held_out)
        return corpus([training]), corpus([held_out])
    count = min(max(1, round(config.held_out * len(documents))), len(documents) - 1)
    by_hash = sorted(documents, key=lambda document: _name_hash(document.path.relative_to(root)))
    held_out_paths = {document.path for document in by_hash[:count]}
    return (
        corpus(document for document in documents if document.path not in held_out_paths),
        corpus(document for document in documents if document.path in held_out_paths),
    )


_RECORD_SUFFIXES = (
    "json jsonl ndjson geojson ipynb parquet arrow feather avro orc tfrecord csv tsv xls xlsx ods db sqlite npz pkl "
    "pickle pt pth safetensors h5 hdf5 zip tar tgz gz bz2 xz zst 7z pdf doc docx odt epub png jpg jpeg gif webp "
    "mp3 wav mp4"
)
"""Suffixes of files whose bytes are no plain text: records, archives, documents, pictures."""


def _reject_records(paths: Sequence[Path]) -> None:
    """Raise if a file wraps its text in another format, whose syntax would be trained on as well."""
    suffixes = {f".{suffix}" for suffix in _RECORD_SUFFIXES.split()}
    records = [path for path in paths if path.suffix.lower() in suffixes]
    if records:
        more = f" (and {len(records) - 1} more such files)" if len(records) > 1 else ""
        raise DataError(
            f"{records[0]} is a {records[0].suffix} file{more}, which is not understood: its braces, keys or bytes would be "
            "trained on as text. Write the text itself, as the model is to see it, into .txt files, or its tokens into .npy "
            "files; data.pattern chooses files of a folder"
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


def _files_below(root: Path, pattern: str) -> list[Path]:
    """Return the file `root` itself, or the matching files below it, sorted by name and without hidden ones."""
    if os.path.isfile(root):
        return [root]
    if not os.path.isdir(root):
        raise DataError(f"there is no file or folder {root}; data.path must name one")
    paths = []
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(folder, n) for n in fnmatch.filter(names, pattern) if not n.startswith(".")]
    if not paths:
        raise DataError(f"no file in {root} matches {pattern!r}; see data.path and data.pattern")
    return sorted(paths)


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"cannot read the folder {error.filename}: {error.strerror}") from error


def _encode_texts(paths: Sequence[Path], tokenizer: HFTokenizer) -> TokensOf:
    """Return a function from a path to its tokens: of text files in memory, of ``.npy`` files on disk."""
    encoded: dict[Path, npt.NDArray[np.generic]] = {}
    texts = [path for path in paths if path.suffix != ".npy"]
    for start in range(0, len(texts), _TEXTS_PER_BATCH):
        batch = texts[start : start + _TEXTS_PER_BATCH]
        encoded.update(zip(batch, tokenizer.encode_batch(map(_read_text, batch)), strict=True))
    on_disk = token_files()
    return lambda path: encoded[path] if path in encoded else on_disk(path)


def _read_text(path: Path) -> str:
    try:
        require_regular(path)
        return path.read_text("utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise DataError(f"{path} does not fit into memory as one text; divide it") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no UTF-8 text ({error.reason} at byte {error.start}), which the tokenizer reads; data.pattern "
            "chooses files"
        ) from error
