"""Tokens of records, each marked as trained on or as context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import DataError
from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.records.chat_template import ChatTemplate
from penstock.train.data.records.record_files import Place, ReadRecord
from penstock.train.data.records.record_text import Messages, RecordText, kind_of, text_of
from penstock.train.data.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer

CONTEXT = np.uint32(1 << 31)
"""Bit of a stored token that is never a target: part of a prompt, or of another's turn in a chat."""

FlaggedTokens = npt.NDArray[np.uint32]
_Ranges = npt.NDArray[np.int64]
_Tokens = tuple[FlaggedTokens, _Ranges]


@dataclass(frozen=True)
class EncodedRecord:
    """Tokens of a record, uint32 of shape (tokens,), with `CONTEXT` where they are; and the bytes of its trained text."""

    tokens: FlaggedTokens
    trained_bytes: int


class RecordEncoder:
    """Encoder of the records of one source, which are all of one kind.

    Args:
        config: the ``[data]`` section.
        tokenizer: tokenizer of the model.
        folder: Hugging Face folder with the chat template; None for a model of Penstock's own.

    Attributes:
        kind: kind of the records: ``text``, ``completion`` or ``chat``; None before the first one.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, folder: Path | None) -> None:
        self.kind: str | None = None
        self._config = config
        self._tokenizer = tokenizer
        self._folder = folder
        self._template: ChatTemplate | None = None

    def encode(self, records: Sequence[ReadRecord]) -> list[EncodedRecord]:
        """Return the tokens of some records; empty ones have none.

        Raises:
            DataError: if a record is malformed, or the tokenizer cannot encode it; names its line or row.
            ConfigError: if chats cannot be rendered for this model.
        """
        if not records:
            return []
        if self.kind is None:
            self.kind = kind_of(records[0].values, self._config, records[0].place)
        texts = [
            text_of(record.values, self.kind, self._config, record.place, self._render) for record in records
        ]
        encode = self._encode_bytes if isinstance(self._tokenizer, ByteTokenizer) else self._encode_texts
        return [
            EncodedRecord(tokens, sum(len(text.text[a:b].encode()) for a, b in text.trained))
            for text, tokens in zip(texts, encode(texts, records[0].place), strict=True)
        ]

    def _render(self, messages: Messages, tools: Any, place: Place, prompt: int) -> RecordText:
        if self._template is None:
            if self._folder is None:
                raise DataError(
                    f"{place} is a chat, and Penstock's own model has no chat template; set model.path to a Hugging Face "
                    "chat model, or write the chats as prompt and completion"
                )
            self._template = ChatTemplate(self._folder, self._config.train_on)
        return self._template.render(messages, tools, place, prompt)

    def _encode_bytes(self, texts: Sequence[RecordText], first: Place) -> list[FlaggedTokens]:
        """Return the bytes of UTF-8, and the end token."""
        encoded = []
        for text in texts:
            if not text.text:
                encoded.append(np.zeros(0, np.uint32))
                continue
            flagged = np.frombuffer(text.text.encode(), np.uint8).astype(np.uint32)
            trained = np.zeros(len(flagged), bool)
            for start, stop in text.trained:
                before = len(text.text[:start].encode())
                trained[before : before + len(text.text[start:stop].encode())] = True
            flagged[~trained] |= CONTEXT
            encoded.append(np.append(flagged, np.uint32(self._tokenizer.end or 0)))
        return encoded

    def _encode_texts(self, texts: Sequence[RecordText], first: Place) -> list[FlaggedTokens]:
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, HFTokenizer):
            raise DataError(
                f"{first} is text, but the model has no tokenizer.json; data.path must then name .npy files of tokens"
            )
        prefix = np.array(tokenizer.prefix, np.uint32) | CONTEXT
        end = np.array([] if tokenizer.end is None else [tokenizer.end], np.uint32)
        encoded = []
        for text, tokens in zip(texts, self._flagged(texts, tokenizer), strict=True):
            if not len(tokens):
                encoded.append(np.zeros(0, np.uint32))
                continue
            if (largest := (tokens & ~CONTEXT).max()) >= tokenizer.vocabulary:
                raise DataError(f"the chat template writes a token {largest}, which the model lacks")
            encoded.append(tokens if text.complete else np.concatenate((prefix, tokens, end)))
        return encoded

    def _flagged(self, texts: Sequence[RecordText], tokenizer: HFTokenizer) -> Iterator[FlaggedTokens]:
        """Yield the tokens of each text, marked, without those around it."""
        rendered = iter(self._encode_chats([text.text for text in texts if text.complete]))
        plain = [text for text in texts if not text.complete]
        joint = tokenizer.encode_with_offsets([text.text for text in plain])
        divided = iter(_divided(plain, joint, tokenizer))
        together = iter(joint)
        for text in texts:
            tokens, ranges = next(rendered if text.complete else together)
            apart = None if text.complete else next(divided)
            yield _marked(text, tokens, ranges) if apart is None else apart

    def _encode_chats(self, texts: list[str]) -> list[_Tokens]:
        if not texts:
            return []
        assert self._template is not None, "it has rendered the texts"
        batch = self._template.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        return [
            (np.array(ids, np.uint32), np.array(offsets, np.int64).reshape(-1, 2))
            for ids, offsets in zip(batch["input_ids"], batch["offset_mapping"], strict=True)
        ]


def _divided(
    texts: Sequence[RecordText], joint: Sequence[_Tokens], tokenizer: HFTokenizer
) -> list[FlaggedTokens | None]:
    """Return the tokens of each prompt and completion encoded apart, where a token would span both; else None.

    The model is asked with the prompt's own tokens. Some tokenizers change a text that is encoded alone, for example by a
    blank before it; then the text is not encoded apart.
    """
    numbers = [
        n for n, (text, (_, ranges)) in enumerate(zip(texts, joint, strict=True)) if _may_span(text, ranges)
    ]
    begins = [texts[n].trained[0][0] for n in numbers]
    prompts = tokenizer.encode_batch(texts[n].text[:at] for n, at in zip(numbers, begins, strict=True))
    completions = tokenizer.encode_batch(texts[n].text[at:] for n, at in zip(numbers, begins, strict=True))
    divided: list[FlaggedTokens | None] = [None] * len(texts)
    for n, prompt, completion in zip(numbers, prompts, completions, strict=True):
        both = np.concatenate((prompt, completion))
        if tokenizer.decode_all(both) == tokenizer.decode_all(joint[n][0]):
            divided[n] = np.concatenate((prompt | CONTEXT, completion))
    return divided


def _may_span(text: RecordText, ranges: _Ranges) -> bool:
    """Return whether a token may be part of both the prompt and the completion, also if its blanks are trimmed."""
    begin = text.trained[0][0]
    if not 0 < begin < len(text.text) or not len(ranges):
        return False
    first = np.concatenate(([0], ranges[:-1, 1]))
    stop = np.concatenate((ranges[1:, 0], [len(text.text)]))
    lowest, highest = np.minimum(first, ranges[:, 0]), np.maximum(stop, ranges[:, 1])
    return bool(((lowest < begin) & (begin < highest)).any())


def _marked(text: RecordText, tokens: FlaggedTokens, ranges: _Ranges) -> FlaggedTokens:
    """Return tokens, marked as context unless a part of them is trained on."""
    trained = np.zeros(len(tokens), bool)
    if text.tokens is not None:
        for first, end in text.tokens:
            trained[first:end] = True
    else:
        starts, ends = ranges[:, 0], ranges[:, 1]
        for start, stop in text.trained:
            # The empty range of a trimmed blank is at the end of the blank.
            inside = np.where(starts < ends, starts < stop, ends <= stop)
            trained |= inside & (ends > (start or -1))
    return np.where(trained, tokens, tokens | CONTEXT)
