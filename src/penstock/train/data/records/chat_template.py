"""Chats as text: the chat template of a Hugging Face folder, and the characters that the assistant wrote.

A template that marks the assistant's turns (``{% generation %}``) says itself which they are. For another one, a turn is
what is added to the chat before it, with the template's prompt for an answer. That holds only if the shorter chat is the
beginning of the longer one, which is checked for every turn.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import ConfigError, DataError
from penstock.train.data.records.record_files import Place
from penstock.train.data.records.record_text import Messages, RecordText
from penstock.train.data.tokenizer import TOKENIZER_FILE

TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
"""Files of a folder that a rendered chat depends on, beside the tokenizer itself."""
_Range = tuple[int, int]
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """The chat template of a Hugging Face folder.

    Args:
        folder: folder with the tokenizer and its template.
        train_on: trained part: ``answers``, ``last`` or ``all``.

    Raises:
        ConfigError: if transformers is not installed, or the folder has no tokenizer or no template.
    """

    def __init__(self, folder: Path, train_on: str) -> None:
        if not (folder / TOKENIZER_FILE).is_file():
            raise ConfigError(f"chats need the {TOKENIZER_FILE} of the model, and there is none in {folder}")
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise ConfigError(
                "chats need the transformers package: pip install 'penstock-torch[transformers]'"
            ) from error
        try:
            self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the library raises many kinds
            raise DataError(f"transformers cannot read the tokenizer in {folder}: {error}") from error
        template = self.tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not isinstance(template, str) or not template:
            raise ConfigError(
                f"{folder} has no chat template, so its model's format of a chat is unknown; put the template of its chat "
                "model into chat_template.jinja there, or write the chats as prompt and completion"
            )
        self._folder = folder
        self._train_on = train_on
        self._marked = _MARKED.search(template) is not None

    def render(self, messages: Messages, tools: Any, place: Place, prompt: int = 0) -> RecordText:
        """Return the text of a chat, with the assistant's turns as its trained ranges.

        Args:
            messages: messages of the chat.
            tools: tools that the template describes to the model; None for none.
            place: place of the chat.
            prompt: number of messages at the beginning that are only context.

        Raises:
            DataError: if the template refuses the chat, or the assistant's turns cannot be told; names the place.
        """
        text = self._text(messages, tools, place)
        if self._train_on == "all":
            return RecordText(text, ((0, len(text)),), complete=True)
        if self._marked:
            turns, tokens = self._marked_turns(messages, tools, place, text, prompt)
            first = max(0, len(turns) - 1) if self._train_on == "last" else 0
            return RecordText(text, tuple(turns[first:]), complete=True, tokens=tuple(tokens[first:]))
        added = self._added_turns(messages, tools, place, text, prompt)
        return RecordText(text, tuple(added[-1:] if self._train_on == "last" else added), complete=True)

    def _text(self, messages: Messages, tools: Any, place: Place, asks: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools=tools or None, tokenize=False, add_generation_prompt=asks
                )
            )
        except Exception as error:  # also the template's own refusals
            raise DataError(
                f"{place}: the chat template of {self._folder} refuses the chat: {error}"
            ) from error

    def _marked_turns(
        self, messages: Messages, tools: Any, place: Place, text: str, prompt: int
    ) -> tuple[list[_Range], list[_Range]]:
        """Return the ranges of characters that the template marks, and those of tokens, as transformers gives them."""
        context = self._text(messages[:prompt], tools, place) if prompt else ""
        if not text.startswith(context):
            raise DataError(
                f"{place}: it cannot be told where the completion begins: the chat template of {self._folder} writes the "
                "prompt differently when more follows. Write prompt and completion as one list of messages, or train on "
                "everything (data.train_on=all)"
            )
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except Exception as error:
            raise DataError(
                f"{place}: the chat template of {self._folder} refuses the chat: {error}"
            ) from error
        edges = np.flatnonzero(
            np.diff(np.array(rendered["assistant_masks"], bool), prepend=False, append=False)
        )
        places = offsets["offset_mapping"]
        turns, tokens = [], []
        for first, end in edges.reshape(-1, 2).tolist():
            start, stop = places[first][0], places[end - 1][1]
            # By its middle: a token may span the prompt's end.
            if start + stop > 2 * len(context):
                turns.append((start, stop))
                tokens.append((first, end))
        return turns, tokens

    def _added_turns(
        self, messages: Messages, tools: Any, place: Place, text: str, prompt: int
    ) -> list[_Range]:
        """Return the ranges of characters that each of the assistant's turns adds to the chat before it."""
        numbers = [n for n, message in enumerate(messages) if n >= prompt and message["role"] == "assistant"]
        turns = []
        for n in numbers[-1:] if self._train_on == "last" else numbers:
            before = self._text(messages[:n], tools, place, asks=True)
            after = self._text(messages[: n + 1], tools, place)
            if not (after.startswith(before) and text.startswith(after)):
                later = ", or train only on the last turn (data.train_on=last)" if n != numbers[-1] else ""
                raise DataError(
                    f"{place}: it cannot be told which characters are the assistant's message {n + 1}: the chat template of "
                    f"{self._folder} writes the chat up to there differently when more follows. Mark the assistant's turns "
                    "in the template with {% generation %} and {% endgeneration %}"
                    f"{later}, or on everything (data.train_on=all)"
                )
            turns.append((len(before), len(after)))
        return turns
