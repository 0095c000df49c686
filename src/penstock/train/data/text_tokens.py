"""Tokens of text: files, and the text column of a folder that Hugging Face's ``datasets`` saved.

Text is tokenized when a run starts, by every process, and its tokens stay in memory, 4 bytes each. A corpus for which that
takes too long is tokenized once into ``.npy`` files, which are read from disk by position.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.base.bounded_io import open_regular
from penstock.base.errors import ConfigError, DataError, nearest
from penstock.train.config.sections import DataConfig
from penstock.train.data.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer

Tokens = npt.NDArray[np.uint32]
Watch = Callable[[str, float], None]
"""Function that receives the name of a file that is being tokenized, and the share of all files that is done."""

# Files or rows that are encoded together, by several threads of the tokenizer.
_BATCH = 64
# Bytes of a text that are encoded at once; a longer one is divided between lines.
_TEXT = 1 << 24


def tokens_of_files(paths: Sequence[Path], tokenizer: HFTokenizer, watch: Watch) -> dict[Path, Tokens]:
    """Return the tokens of each text file, without an end token."""
    tokens: dict[Path, Tokens] = {}
    for start in range(0, len(paths), _BATCH):
        group = paths[start : start + _BATCH]
        watch(str(group[0]), start / len(paths))
        small = [path for path in group if path.stat().st_size <= _TEXT // _BATCH]
        together = tokenizer.encode_batch(["".join(_pieces(path)) for path in small])
        tokens |= dict(zip(small, together, strict=True))
        for path in group:
            if path not in tokens:
                pieces = [tokenizer.encode_batch([piece])[0] for piece in _pieces(path)]
                tokens[path] = np.concatenate(pieces)
    return tokens


def tokens_of_dataset(folder: Path, config: DataConfig, tokenizer: Tokenizer, watch: Watch) -> Tokens:
    """Return the tokens of all rows of a folder that ``datasets`` saved, each row followed by the end token."""
    if not isinstance(tokenizer, ByteTokenizer | HFTokenizer):
        raise ConfigError(
            f"the rows of {folder} are text, but the model has no tokenizer; data.path must then name .npy files of tokens"
        )
    end = np.array([] if tokenizer.end is None else [tokenizer.end], np.uint32)
    pieces: list[Tokens] = []
    for rows, share in _rows(folder, config):
        watch(str(folder), share)
        if isinstance(tokenizer, HFTokenizer):
            encoded = tokenizer.encode_batch(rows)
        else:
            encoded = [np.frombuffer(row.encode(), np.uint8).astype(np.uint32) for row in rows]
        pieces += [part for one in encoded if len(one) for part in (one, end)]
    return np.concatenate(pieces) if pieces else end[:0]


def _rows(folder: Path, config: DataConfig) -> Iterator[tuple[list[str], float]]:
    """Yield the text of some rows, and the share of all rows that comes before them."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{folder} needs the datasets package: pip install 'penstock-torch[data]'"
        ) from error
    for path in sorted(folder.rglob("*")):
        # The library would wait for a pipe, or read a device without end.
        if not (path.is_file() or path.is_dir()):
            raise DataError(f"{path} is not a regular file")
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises many kinds
        raise DataError(f"cannot read the data set in {folder}: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if config.split not in loaded:
            raise ConfigError(
                f"{folder} has no split {config.split!r}{nearest(config.split, list(loaded))}; set data.split to one of "
                f"{', '.join(loaded)}"
            )
        loaded = loaded[config.split]
    field = config.text_field
    if field not in loaded.column_names:
        raise DataError(
            f"the data set in {folder} has no column {field!r}{nearest(field, loaded.column_names)}; set data.text_field to "
            f"the one with text: {', '.join(loaded.column_names)}. Chats and completions are trained by "
            "penstock.PipelineTrainer"
        )
    texts = loaded.select_columns([field]).with_format("arrow")
    for start in range(0, len(loaded), _BATCH):
        try:
            read = texts[start : start + _BATCH]
            read.validate(full=True)  # of offsets beyond its memory, pyarrow would read whatever is there
            rows = read[field].to_pylist()
        except Exception as error:
            raise DataError(f"cannot read the data set in {folder}, after row {start:,}: {error}") from error
        for number, row in enumerate(rows, start + 1):
            if not isinstance(row, str):
                raise DataError(f"{folder}, row {number:,}: {field} must be text, got {str(row)[:60]!r}")
        yield rows, start / len(loaded)


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
            f"{path} is not UTF-8 text ({error.reason} at byte {read + error.start}), which the tokenizer reads; "
            "data.pattern chooses files"
        ) from error
