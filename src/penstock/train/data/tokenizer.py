"""Tokenizers: bytes, plain numbers, or a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.base.bounded_io import MEGABYTE, read_bytes
from penstock.base.errors import ConfigError, DataError, first_line, os_errors_as

END = 0
"""Token that marks the end of a file, where tokens are bytes or numbers."""

BYTES = 256
"""Vocabulary of a model whose tokens are bytes."""

TOKENIZER_FILE = "tokenizer.json"
_MAX_FILE_BYTES = 512 * MEGABYTE


class Tokenizer(Protocol):
    """Conversion between text and a model's tokens."""

    @property
    def end(self) -> int | None: ...

    @property
    def unit(self) -> str: ...

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, at least one."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Tokenizer whose tokens are the bytes of UTF-8; an empty prompt is the start of a file, a 0."""

    end: int | None = END
    unit: str = "byte"

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode()) or [END]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace").lstrip("\0")


@dataclass(frozen=True)
class NumberTokenizer:
    """Tokenizer whose tokens are numbers below `vocabulary`, separated by blanks; an empty prompt is a 0."""

    vocabulary: int
    end: int | None = None
    unit: str = "token"

    def encode(self, prompt: str) -> list[int]:
        try:
            tokens = [int(number) for number in prompt.split()] or [END]
        except ValueError:
            tokens = [-1]
        if not all(0 <= token < self.vocabulary for token in tokens):
            raise ConfigError(
                f"the prompt must be token numbers from 0 to {self.vocabulary - 1}, separated by spaces, got {prompt!r}: "
                f"the model's vocabulary is not the {BYTES} bytes and has no tokenizer"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


@dataclass(frozen=True)
class HFTokenizer:
    """A tokenizer of Hugging Face's ``tokenizers``, without the special tokens it would add by itself.

    Attributes:
        end: end-of-text token, which also follows every training file; None where the model has none.
        start: the token of an empty prompt.
    """

    tokenizer: Any
    vocabulary: int
    end: int | None
    start: int
    unit: str = "token"

    def encode(self, prompt: str) -> list[int]:
        with _library_errors("the tokenizer cannot encode this text"):
            return list(self.tokenizer.encode(prompt, add_special_tokens=False).ids) or [self.start]

    def decode(self, tokens: Sequence[int]) -> str:
        with _library_errors("the tokenizer cannot decode these tokens"):
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode_batch(self, texts: Iterable[str]) -> list[npt.NDArray[np.uint32]]:
        """Return the tokens of several texts."""
        with _library_errors("the tokenizer cannot encode this text"):
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]


@contextlib.contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Raise errors of ``tokenizers`` as DataError, also panics of its Rust code, whose class is not an Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {first_line(error)}") from error


def read_tokenizer(path: Path, vocabulary: int, end: int | None, start: int | None) -> HFTokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the tokenizers package: pip install 'penstock-torch[transformers]'"
        ) from error
    with os_errors_as(DataError, f"cannot read the tokenizer {path}"):
        content = read_bytes(path, _MAX_FILE_BYTES)
    with _library_errors(f"cannot read the tokenizer {path}"):
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocabulary:
        raise ConfigError(
            f"{path} has tokens up to {largest}, but the model's vocab_size is {vocabulary}; they do not belong together"
        )
    first = next((t for t in (start, end) if t is not None), END)
    return HFTokenizer(tokenizer, vocabulary, end, first)
