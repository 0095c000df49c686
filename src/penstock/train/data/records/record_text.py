"""Text of a record: pieces that are trained on, and pieces that are only context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.base.errors import DataError
from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.records.record_files import Place

Messages = list[dict[str, Any]]
_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
"""Role of a message by its sender in the ShareGPT format."""


@dataclass(frozen=True)
class RecordText:
    """Text of a record.

    Attributes:
        text: the whole text.
        trained: ranges of its characters that are trained on, in order.
        complete: whether a template has written the tokens of start and end into the text.
        tokens: ranges of the tokens that are trained on, if a template's marks say which; else None.
    """

    text: str
    trained: tuple[tuple[int, int], ...]
    complete: bool = False
    tokens: tuple[tuple[int, int], ...] | None = None


RenderChat = Callable[[Messages, Any, Place, int], RecordText]
"""Function from messages, tools, place and the number of messages that are only context to the text of a chat."""


def kind_of(record: dict[str, Any], config: DataConfig, place: Place) -> str:
    """Return the kind of a record: ``text``, ``completion`` or ``chat``.

    Raises:
        DataError: if its fields are of no kind or of several, and ``data.record`` does not say which; says what to set.
    """
    if config.record != "auto":
        return config.record
    fields = _fields(config)
    kinds = [kind for kind, names in fields.items() if all(name in record for name in names)]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise DataError(
            f"{place} could be of kind {' or '.join(kinds)} by its fields {_names(record)}; set data.record to one of them"
        )
    raise DataError(
        f"{place} has the fields {_names(record)}, and none of {_wanted(fields)}; set data.text_field, "
        "data.prompt_field and data.completion_field, or data.messages_field to the names that it has"
    )


def text_of(
    record: dict[str, Any], kind: str, config: DataConfig, place: Place, render: RenderChat
) -> RecordText:
    """Return the text of a record of a kind.

    Args:
        record: the record.
        kind: ``text``, ``completion`` or ``chat``.
        config: the ``[data]`` section.
        place: place of the record.
        render: renders a chat.

    Raises:
        DataError: if a field is missing or has another type; names the place.
    """
    for name in _fields(config)[kind]:
        if name not in record:
            raise DataError(
                f"{place} has no field {name!r}, only {_names(record)}; every record of a source must be of kind {kind}, as "
                "the first one (or data.record) says"
            )
    if kind == "chat":
        messages = _messages(record[config.messages_field], place)
        return _require_characters(render(messages, record.get("tools"), place, 0), place)
    if kind == "completion" and isinstance(record[config.prompt_field], list):
        prompt, completion = (_messages(record[name], place) for name in _fields(config)[kind])
        text = render(prompt + completion, record.get("tools"), place, len(prompt))
        return _require_characters(text, place)
    texts = [_text(record, name, place) for name in _fields(config)[kind]]
    whole = "".join(texts)
    begins = len(texts[0]) if kind == "completion" and config.train_on != "all" else 0
    return _require_characters(RecordText(whole, ((begins, len(whole)),)), place)


def _fields(config: DataConfig) -> dict[str, tuple[str, ...]]:
    return {
        "chat": (config.messages_field,),
        "completion": (config.prompt_field, config.completion_field),
        "text": (config.text_field,),
    }


def _names(record: dict[str, Any]) -> str:
    return ", ".join(map(repr, list(record)[:12])) or "none"


def _wanted(fields: dict[str, tuple[str, ...]]) -> str:
    return ", ".join(" with ".join(map(repr, names)) for names in fields.values())


def _text(record: dict[str, Any], name: str, place: Place) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise DataError(f"{place}: {name!r} must be text, got {_shown(value)}")
    return value


def _require_characters(text: RecordText, place: Place) -> RecordText:
    try:
        text.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place} has half a character, which no text may have: {error}") from error
    return text


def _messages(value: Any, place: Place) -> Messages:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise DataError(
            f"{place}: the messages must be a list of objects with 'role' and 'content', got {_shown(value)}"
        )
    # Tables have every field in every row, null where a message has none.
    messages = [{key: inner for key, inner in message.items() if inner is not None} for message in value]
    if messages and messages[0].keys() == {"from", "value"}:
        messages = [_with_role(message, n, place) for n, message in enumerate(messages, 1)]
    for n, message in enumerate(messages, 1):
        role, content = message.get("role"), _content(message)
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(
                f"{place}: message {n} must have 'role' and 'content', both text, got {_shown(value[n - 1])}; content may "
                "also be a list of parts of type 'text'; only a message with 'tool_calls' may have none: leave others out"
            )
        message["content"] = content
    return messages


def _content(message: dict[str, Any]) -> object:
    """Return the content of a message, with parts of text joined, which is how chat templates write them."""
    content = message.get("content", "" if "tool_calls" in message else None)
    if not isinstance(content, list) or not content:
        return content
    texts = [
        part["text"]
        for part in content
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    ]
    return "".join(texts) if len(texts) == len(content) else content


def _with_role(message: dict[str, Any], number: int, place: Place) -> dict[str, Any]:
    """Return a message of the ShareGPT format, which has ``from`` and ``value``, with ``role`` and ``content``."""
    sender, text = message.get("from"), message.get("value")
    if not isinstance(sender, str) or sender not in _ROLES or not isinstance(text, str):
        raise DataError(
            f"{place}: message {number} must have 'from' ({', '.join(_ROLES)}) and 'value', which is text, as the chat "
            f"begins in the ShareGPT format, got {_shown(message)}; write other messages with 'role' and 'content'"
        )
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**others, "role": _ROLES[sender], "content": text}


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
