"""Chats become the tokens and the mask that transformers gives."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from penstock.base.errors import ConfigError, DataError
from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.file_formats import find_files
from penstock.train.data.records.record_encoder import CONTEXT
from penstock.train.data.records.record_store import RecordStore
from penstock.train.data.token_cache import TokenCache
from penstock.train.data.tokenizer import ByteTokenizer, read_tokenizer
from tests.support import records


def stored(root: Path, lines: list[dict], template: str | None, **config: object) -> RecordStore:
    place = records.folder(root, template=template)
    path = records.write_lines(root / "chats.jsonl", lines)
    tokenizer = read_tokenizer(place / "tokenizer.json", 260, records.END, records.START)
    data = DataConfig(path=str(path), **config)
    return TokenCache(None, tokenizer, place).records(find_files(data), data)


def flagged(store: RecordStore, n: int) -> tuple[list[int], list[bool]]:
    tokens = store.read(int(store.starts[n]), int(store.lengths()[n]))
    return (tokens & ~CONTEXT).tolist(), (tokens < CONTEXT).tolist()


def test_a_marked_template_gives_transformers_tokens_and_mask(tmp_path: Path):
    chats = records.chats(12)
    store = stored(tmp_path, chats, records.MARKED)
    library = PreTrainedTokenizerFast.from_pretrained(tmp_path / "llama-chat")
    for n, chat in enumerate(chats):
        expected = library.apply_chat_template(
            chat["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens, mask = flagged(store, n)
        assert tokens == expected["input_ids"]
        assert mask == [bool(one) for one in expected["assistant_masks"]]


def test_without_marks_a_turn_is_what_it_adds_to_the_chat_before_it(tmp_path: Path):
    chats = records.chats(12)
    store = stored(tmp_path, chats, records.PLAIN)
    library = PreTrainedTokenizerFast.from_pretrained(tmp_path / "llama-chat")
    for n, chat in enumerate(chats):
        tokens, mask = flagged(store, n)
        assert tokens == library.apply_chat_template(chat["messages"], tokenize=True)["input_ids"]
        answers = [m["content"] + "<|im_end|>\n" for m in chat["messages"] if m["role"] == "assistant"]
        assert library.decode(np.array(tokens)[mask]) == "".join(answers)
        assert int(store.sizes[n]) == len("".join(answers).encode())


@pytest.mark.parametrize("template", [records.PLAIN, records.MARKED], ids=["plain", "marked"])
def test_the_last_turn_alone_and_everything_can_be_trained(tmp_path: Path, template: str):
    chats = records.chats(6)
    last = stored(tmp_path, chats, template, train_on="last")
    library = PreTrainedTokenizerFast.from_pretrained(tmp_path / "llama-chat")
    for n, chat in enumerate(chats):
        tokens, mask = flagged(last, n)
        trained = library.decode(np.array(tokens)[mask]).rstrip("\n")
        assert trained == chat["messages"][-1]["content"] + "<|im_end|>"
    everything = stored(tmp_path, chats, template, train_on="all")
    assert all(all(flagged(everything, n)[1]) for n in range(6))


@pytest.mark.parametrize("template", [records.PLAIN, records.MARKED], ids=["plain", "marked"])
def test_a_prompt_and_completion_of_messages_train_the_completion_alone(tmp_path: Path, template: str):
    chats = records.chats(12)
    lines = [{"prompt": chat["messages"][:-1], "completion": chat["messages"][-1:]} for chat in chats]
    store = stored(tmp_path, [*lines, {"prompt": "1 + 1 = ", "completion": "2"}], template)
    assert store.kind == "completion"
    library = PreTrainedTokenizerFast.from_pretrained(tmp_path / "llama-chat")
    for n, chat in enumerate(chats):
        tokens, mask = flagged(store, n)
        assert tokens == library.apply_chat_template(chat["messages"], tokenize=True)["input_ids"]
        trained = library.decode(np.array(tokens)[mask]).rstrip("\n")
        assert trained == chat["messages"][-1]["content"] + "<|im_end|>"
    tokens, mask = flagged(store, len(chats))
    assert library.decode(np.array(tokens)[mask]) == "2</s>"
    with pytest.raises(DataError, match=r"line 2: the messages must be a list of objects .* got '2'"):
        stored(tmp_path, [lines[0], {"prompt": lines[0]["prompt"], "completion": "2"}], template)


def test_a_prompt_that_is_written_differently_when_more_follows_is_refused(tmp_path: Path):
    template = "{{ messages | length }}" + records.MARKED
    chat = records.chats(1)[0]["messages"]
    with pytest.raises(DataError, match=r"line 1: it cannot be told where the completion begins"):
        stored(tmp_path, [{"prompt": chat[:-1], "completion": chat[-1:]}], template)


def test_a_template_that_writes_earlier_turns_differently_is_refused_by_line(tmp_path: Path):
    one = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    single, several = {"messages": list(one)}, {"messages": [*one, *one]}
    store = stored(tmp_path, [single], records.LAST_DIFFERS)
    assert sum(flagged(store, 0)[1]) == len("<think></think>ho") + 2
    with pytest.raises(
        DataError, match=r"chats.jsonl, line 2: it cannot be told .* message 2.*data.train_on=last"
    ):
        stored(tmp_path, [single, several], records.LAST_DIFFERS)
    store = stored(tmp_path, [single, several], records.LAST_DIFFERS, train_on="last")
    assert len(store) == 2


def test_chats_that_cannot_be_rendered_are_refused(tmp_path: Path):
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        DataError, match=r"line 1: the chat template of .* refuses the chat: roles must alternate"
    ):
        stored(tmp_path, records.chats(2), strict)
    (tmp_path / "llama-chat" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"has no chat template.*chat_template\.jinja"):
        stored(tmp_path, records.chats(2), None)
    data = DataConfig(path=str(tmp_path / "chats.jsonl"))
    with pytest.raises(DataError, match=r"own model has no chat template; set model\.path"):
        TokenCache(None, ByteTokenizer(), None).records(find_files(data), data)


@pytest.mark.parametrize("template", [records.PLAIN, records.MARKED], ids=["plain", "marked"])
def test_messages_of_sharegpt_are_those_with_roles(tmp_path: Path, template: str):
    chats = records.chats(12)
    sender = {"user": "human", "assistant": "gpt", "system": "system"}
    lines = [
        {"conversations": [{"from": sender[m["role"]], "value": m["content"]} for m in chat["messages"]]}
        for chat in chats
    ]
    lines[0]["conversations"][-1]["weight"] = None  # as a table has it
    other = stored(tmp_path, lines, template, messages_field="conversations")
    (tmp_path / "roles").mkdir()
    expected = stored(tmp_path / "roles", chats, template)
    assert [flagged(other, n) for n in range(12)] == [flagged(expected, n) for n in range(12)]


@pytest.mark.parametrize("template", [records.PLAIN, records.MARKED], ids=["plain", "marked"])
def test_content_may_be_parts_of_text(tmp_path: Path, template: str):
    chats = records.chats(12)
    lines = copy.deepcopy(chats)
    for message in (message for chat in lines for message in chat["messages"]):
        text = message["content"]
        message["content"] = [{"type": "text", "text": part} for part in (text[:2], text[2:])]
    (tmp_path / "parts").mkdir()
    other, expected = stored(tmp_path / "parts", lines, template), stored(tmp_path, chats, template)
    assert [flagged(other, n) for n in range(12)] == [flagged(expected, n) for n in range(12)]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "the messages must be a list of objects"),
        ([{"role": "user"}], "message 1 must have 'role' and 'content'"),
        ([{"role": "user", "content": ["an image"]}], "message 1 must have 'role' and 'content', both text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "text": None}]}],
            "message 1 must have 'role' and 'content', both text, .*; content may also be a list of parts of type 'text'",
        ),
        ([{"role": "user", "content": []}], "message 1 must have 'role' and 'content', both text"),
        (
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}],
            r"message 2 must have .* got \{'role': 'assistant', 'content': None\}; .* only a message with 'tool_calls'",
        ),
        ([{"from": "human", "value": 5}], r"message 1 must have 'from' \(human, gpt, system\) and 'value'"),
        (
            [{"from": "human", "value": "a"}, {"from": "b", "value": "c"}],
            "message 2 must .* got {'from': 'b'",
        ),
        ([{"from": "human", "value": "a"}, {"from": ["gpt"]}], "message 2 must have 'from'"),
        ([{"from": "human", "value": "a", "id": 1}], "message 1 must have 'role' and 'content'"),
    ],
)
def test_malformed_messages_are_named(tmp_path: Path, messages: object, said: str):
    with pytest.raises(DataError, match=said) as error:
        stored(tmp_path, [*records.chats(3), {"messages": messages}], records.PLAIN)
    assert "chats.jsonl, line 4" in str(error.value)
