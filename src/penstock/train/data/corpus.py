"""Files as one long sequence of tokens, read where they lie: only what is asked for is in memory.

A text file's tokens are its bytes and a 0 that marks its end; a ``.npy`` file's are its integers. Where there is a
tokenizer, text goes through it once at the start, and its tokens are held in memory.
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
from penstock.train.config.config import DataConfig
from penstock.train.data.token_file import TokenFile, token_files
from penstock.train.data.tokenizer import END, HFTokenizer

Tokens = npt.NDArray[np.int64]
TokensOf = Callable[[Path], TokenFile | npt.NDArray[np.generic]]

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_CHUNK = 1 << 20
_TOGETHER = 64


@dataclass(frozen=True)
class Document:
    """A part of a file.

    Attributes:
        path: of the file.
        start, stop: the file's tokens start..stop-1, without the end mark.
        end_mark: 1 where the end token follows the last one, else 0.
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
        tokens_of: from a file to its tokens, one dimension of integers; by default where they lie.
        end: the end token.
        root: the folder that the files' names are told within.

    Attributes:
        documents: in order.
        offsets: int64, shape (documents + 1,); where each starts.
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
        """A document's file, within the folder where there is one; bytes that are no UTF-8 are written as ``\\xNN``."""
        path = document.path
        name = path.name if self._root in (None, path) else path.relative_to(self._root or "").as_posix()
        return os.fsencode(name).decode("utf-8", "backslashreplace")

    def read(self, start: int, length: int) -> Tokens:
        """Tokens start..start+length-1, int64 of shape (length,).

        Raises:
            DataError: a file can no longer be read, or is shorter than when the run began.
        """
        out = np.full(length, self._end, np.int64)
        at, filled = int(np.searchsorted(self.offsets, start, side="right")) - 1, 0
        while filled < length:
            document = self.documents[at]
            skip = start + filled - int(self.offsets[at])
            take = min(len(document) - skip, length - filled)
            # The end token left as it is where the end mark falls into the part taken.
            stored = min(take, document.stop - document.start - skip)
            if stored > 0:
                first = document.start + skip
                part = self._tokens_of(document.path)[first : first + stored]
                if len(part) != stored:
                    raise DataError(f"{document.path} became shorter while it was being read")
                out[filled : filled + stored] = part
            filled += take
            at += 1
        return out

    def chunks(self) -> Iterator[Tokens]:
        """All tokens in pieces of at most 2^20, each but the first beginning with the last one's last token."""
        for start in range(0, max(len(self) - 1, 1), _CHUNK - 1):
            yield self.read(start, min(_CHUNK, len(self) - start))


def open_corpora(config: DataConfig, words: HFTokenizer | None = None) -> tuple[Corpus, Corpus]:
    """Find the files and divide them into what is trained on and what is held out.

    Of several files those with the smallest hash of their name (within the folder) are held out, so the division
    depends on nothing else; of a single file, its end is.

    Args:
        config: where the files are.
        words: what text goes through; without it a text's tokens are its bytes.

    Returns:
        (training, held out).

    Raises:
        DataError: nothing found, a file that cannot be read, one that is no list of tokens, or one in a format of records.
    """
    if config.path:
        root = Path(config.path).expanduser()
        paths = _files_below(root, config.pattern)
        _require_plain(paths)
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [p for p in _files_below(root, "*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts)]
    tokens_of: TokensOf = token_files() if words is None else _tokenised(paths, words)
    end = END if words is None else words.end
    found = [_whole(path, len(tokens_of(path)), end) for path in paths]
    documents = [document for document in found if len(document) > document.end_mark]
    if not documents:
        raise DataError(f"every file in {root} is empty; data.path must name text or .npy token files")

    def corpus(chosen: Iterable[Document]) -> Corpus:
        return Corpus(list(chosen), tokens_of, END if end is None else end, root)

    if len(documents) == 1:
        training, held_out = _divide_one(documents[0], config.held_out)
        return corpus([training]), corpus([held_out])
    count = min(max(1, round(config.held_out * len(documents))), len(documents) - 1)
    by_hash = sorted(documents, key=lambda document: _name_hash(document.path.relative_to(root)))
    apart = {document.path for document in by_hash[:count]}
    return (
        corpus(document for document in documents if document.path not in apart),
        corpus(document for document in documents if document.path in apart),
    )


_RECORDS = (
    "json jsonl ndjson geojson ipynb parquet arrow feather avro orc tfrecord csv tsv xls xlsx ods db sqlite npz pkl "
    "pickle pt pth safetensors h5 hdf5 zip tar tgz gz bz2 xz zst 7z pdf doc docx odt epub png jpg jpeg gif webp "
    "mp3 wav mp4"
)
"""Ends of the names of files whose bytes are not the text that is meant: records, archives, documents, pictures."""


def _require_plain(paths: Sequence[Path]) -> None:
    """Refuse files that hold text within something else, which would be trained on as it lies in the file.

    Raises:
        DataError: naming the first.
    """
    kinds = {f".{kind}" for kind in _RECORDS.split()}
    others = [path for path in paths if path.suffix.lower() in kinds]
    if others:
        more = f" (and {len(others) - 1} more such files)" if len(others) > 1 else ""
        raise DataError(
            f"{others[0]} is a {others[0].suffix} file{more}, which is not understood: its braces, keys or bytes would be "
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
    """The file `root` itself, or the files below it that match, sorted by name; hidden ones are passed over."""
    if os.path.isfile(root):
        return [root]
    if not os.path.isdir(root):
        raise DataError(f"there is no file or folder {root}; data.path must name one")
    shown = []
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        shown += [Path(folder, n) for n in fnmatch.filter(names, pattern) if not n.startswith(".")]
    if not shown:
        raise DataError(f"no file in {root} matches {pattern!r}; see data.path and data.pattern")
    return sorted(shown)


def _refuse(error: OSError) -> None:
    raise DataError(f"cannot read the folder {error.filename}: {error.strerror}") from error


def _whole(path: Path, tokens: int, end: int | None) -> Document:
    """All of a file."""
    return Document(path, 0, tokens, 0 if path.suffix == ".npy" or end is None else 1)


def _tokenised(paths: Sequence[Path], words: HFTokenizer) -> TokensOf:
    """The tokens of all files: those of text in memory, the others where they lie."""
    found: dict[Path, npt.NDArray[np.generic]] = {}
    texts = [path for path in paths if path.suffix != ".npy"]
    for start in range(0, len(texts), _TOGETHER):
        some = texts[start : start + _TOGETHER]
        found.update(zip(some, words.tokens_of(map(_text, some)), strict=True))
    others = token_files()
    return lambda path: found[path] if path in found else others(path)


def _text(path: Path) -> str:
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
