"""Tokens as text and text as tokens: bytes, plain numbers, or a Hugging Face tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.bounded_io import MEGABYTE, read_bytes
from penstock.errors import ConfigError, DataError

END = 0
"""The token that marks the end of a file, where tokens are bytes or numbers."""

BYTES = 256
"""The vocabulary of a model whose tokens are bytes."""

TOKENIZER = "tokenizer.json"
_LARGEST_TOKENIZER = 512 * MEGABYTE


class Codec(Protocol):
    """How a model's tokens are read and written.

    Attributes:
        end: the token after which a generated text ends; None for none.
        unit: what a token is called where a person reads it.
    """

    @property
    def end(self) -> int | None: ...

    @property
    def unit(self) -> str: ...

    def encode(self, prompt: str) -> list[int]:
        """A prompt as tokens, at least one.

        Raises:
            ConfigError: it cannot be one.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens as text."""


@dataclass(frozen=True)
class Bytes:
    """Tokens are the bytes of UTF-8; an empty prompt is the start of a file, a 0."""

    end: int | None = END
    unit: str = "byte"

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode()) or [END]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace").lstrip("\0")


@dataclass(frozen=True)
class Numbers:
    """Tokens are numbers below `vocabulary`, written with blanks between them; an empty prompt is a 0."""

    vocabulary: int
    end: int | None = None
    unit: str = "token"

    def encode(self, prompt: str) -> list[int]:
        try:
            tokens = [int(word) for word in prompt.split()] or [END]
        except ValueError:
            tokens = [-1]
        if not all(0 <= token < self.vocabulary for token in tokens):
            raise ConfigError(
                f"the prompt {prompt!r} must be token numbers from 0 to {self.vocabulary - 1}, separated by blanks: "
                f"the model's vocabulary is not the {BYTES} bytes and has no tokenizer"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


@dataclass(frozen=True)
class HFTokenizer:
    """Tokens of a ``tokenizers`` tokenizer, without the special tokens it would add on its own.

    Attributes:
        tokenizer: a ``tokenizers.Tokenizer``.
        vocabulary: the model's.
        end: the end-of-text token, which also follows every training file; None where the model has none.
        start: what an empty prompt is.
    """

    tokenizer: Any
    vocabulary: int
    end: int | None
    start: int
    unit: str = "token"

    def encode(self, prompt: str) -> list[int]:
        with _encoding():
            return list(self.tokenizer.encode(prompt, add_special_tokens=False).ids) or [self.start]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def tokens_of(self, texts: Iterable[str]) -> list[npt.NDArray[np.unsignedinteger[Any]]]:
        """The tokens of several texts, each in as few bytes a token as the vocabulary allows."""
        kind = np.uint16 if self.vocabulary <= 1 << 16 else np.uint32
        with _encoding():
            encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, kind) for each in encoded]


@contextlib.contextmanager
def _encoding() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises nothing more particular
        raise DataError(f"the tokenizer cannot encode this text: {error}") from error


def words_of(path: Path, vocabulary: int, end: int | None, start: int | None) -> HFTokenizer:
    """The tokenizer of a ``tokenizer.json``.

    Args:
        path: of the file.
        vocabulary: the model's; larger than every token.
        end: the model's end-of-text token, if it has one.
        start: the model's first token of a text, if it has one.

    Raises:
        DataError: the file cannot be read.
        ConfigError: the tokenizer has tokens that the model does not have, or the package is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the tokenizers package: pip install 'penstock[transformers]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_buffer(read_bytes(path, _LARGEST_TOKENIZER))
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {path}: {error.strerror}") from error
    except Exception as error:  # the library raises nothing more particular
        raise DataError(f"cannot read the tokenizer {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocabulary:
        raise ConfigError(
            f"{path} has tokens up to {largest}, but the model's vocab_size is {vocabulary}; they do not belong together"
        )
    return HFTokenizer(tokenizer, vocabulary, end, next((t for t in (start, end) if t is not None), END))
