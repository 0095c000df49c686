"""Every byte of a completion is trained on, and the prompt has the tokens that it has when the model is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.records.record_encoder import CONTEXT, EncodedRecord, RecordEncoder
from penstock.train.data.records.record_files import Place, ReadRecord
from penstock.train.data.tokenizer import HFTokenizer

LINES = [f"{n} + {n} =  {2 * n} is  two\n  e" for n in range(60)]
MARK = "\u2581"


def byte_level(*, trim: bool | None, prefix: bool = False, regex: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)
    tokenizer.decoder = decoders.ByteLevel()
    if trim is not None:
        tokenizer.post_processor = processors.ByteLevel(add_prefix_space=prefix, trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level(trim=None),
    "trimmed": byte_level(trim=True),
    "not-trimmed": byte_level(trim=False),
    "trimmed-across-words": byte_level(trim=True, regex=False),
    "blank-first": byte_level(trim=True, prefix=True),
    "always": metaspace("always"),
    "first": metaspace("first"),
    "never": metaspace("never"),
}
ASKED_ALIKE = ("byte-level", "trimmed", "not-trimmed", "trimmed-across-words", "never")
"""Tokenizers that put no blank before a text, so that a prompt can be encoded alone."""


def encoded(name: str, prompt: str, completion: str) -> EncodedRecord:
    tokenizer = HFTokenizer(tokenizer=TOKENIZERS[name], vocabulary=400, end=None, start=0)
    record = ReadRecord(Place(Path("a.jsonl"), "line", 1), {"prompt": prompt, "completion": completion}, 1.0)
    (one,) = RecordEncoder(DataConfig(), tokenizer, None).encode([record])
    return one


def text_of(name: str, tokens: np.ndarray) -> bytes:
    """The bytes that tokens stand for, not what a decoder makes of them."""
    letters = "".join(TOKENIZERS[name].id_to_token(int(token)) for token in tokens)
    if name in ("always", "first", "never"):
        return letters.replace(MARK, " ").encode()
    # The letters of bytes: printable ones are their own, the others follow 255 in order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + n): byte for n, byte in enumerate(others)}
    return bytes(byte_of[letter] for letter in letters)


@pytest.mark.parametrize("name", ASKED_ALIKE)
def test_a_prompt_that_ends_in_a_blank_is_encoded_as_it_is_when_the_model_is_asked(name: str):
    one = encoded(name, "3 + 3 = ", "6")
    asked = TOKENIZERS[name].encode("3 + 3 = ", add_special_tokens=False).ids
    assert (one.tokens[one.tokens >= CONTEXT] & ~CONTEXT).tolist() == asked
    assert text_of(name, one.tokens[one.tokens < CONTEXT]) == b"6"
    assert one.trained_bytes == 1


@pytest.mark.parametrize("name", ["always", "first", "blank-first"])
def test_a_token_that_spans_the_end_of_the_prompt_is_trained_on_where_texts_change_alone(name: str):
    one = encoded(name, "3 + 3 = ", "6")
    assert (one.tokens & ~CONTEXT).tolist() == TOKENIZERS[name].encode("3 + 3 = 6").ids
    assert text_of(name, one.tokens[one.tokens < CONTEXT]) == b" 6"


PIECES = st.lists(st.sampled_from([" ", "  ", "3", "12", "+", "=", "is", "two", "e", "\n"]), max_size=6)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(before=PIECES, after=PIECES)
def test_every_byte_of_a_completion_is_trained_on(name: str, before: list[str], after: list[str]):
    prompt, completion = "".join(before), "".join(after)
    one = encoded(name, prompt, completion)
    context = text_of(name, one.tokens[one.tokens >= CONTEXT] & ~CONTEXT)
    trained = text_of(name, one.tokens[one.tokens < CONTEXT])
    whole = text_of(name, one.tokens & ~CONTEXT)
    assert whole == context + trained  # first all of the context
    assert whole.lstrip(b" ") == (prompt + completion).encode().lstrip(b" ")
    assert trained.endswith(completion.encode()) or (
        not prompt and trained.lstrip() == completion.encode().lstrip()
    )
    assert one.trained_bytes == len(completion.encode())
    if name in ASKED_ALIKE:
        assert trained == completion.encode()


@pytest.fixture(scope="module")
def rendered(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, list], tuple[list[int], list[bool], object]]:
    """A function that encodes a chat under a template without special tokens between turns."""

    def encode(template: str, name: str, messages: list) -> tuple[list[int], list[bool], object]:
        folder = tmp_path_factory.mktemp("model")
        TOKENIZERS[name].save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(template)
        tokenizer = HFTokenizer(tokenizer=TOKENIZERS[name], vocabulary=400, end=None, start=0)
        record = ReadRecord(Place(Path("a.jsonl"), "line", 1), {"messages": messages}, 1.0)
        (one,) = RecordEncoder(DataConfig(), tokenizer, folder).encode([record])
        library = PreTrainedTokenizerFast.from_pretrained(folder)
        return (one.tokens & ~CONTEXT).tolist(), (one.tokens < CONTEXT).tolist(), library

    return encode


CHAT = [{"role": "user", "content": "3 + 3 ="}, {"role": "assistant", "content": "6"}] * 2


@pytest.mark.parametrize("name", ["byte-level", "trimmed", "always"])
def test_a_token_that_spans_the_beginning_of_a_turn_is_trained_on(rendered: Callable, name: str):
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %} {% endif %}{% endfor %}"
    tokens, mask, library = rendered(template, name, CHAT)
    assert tokens == library.encode("3 + 3 = 63 + 3 = 6", add_special_tokens=False)
    assert text_of(name, np.array(tokens)[mask]) == b" 6 6"


@pytest.mark.parametrize("name", ["byte-level", "trimmed", "always"])
def test_marks_inside_of_tokens_give_transformers_mask(rendered: Callable, name: str):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    for chat in (CHAT, [{**m, "content": f"  {m['content']}  "} for m in CHAT]):
        tokens, mask, library = rendered(template, name, chat)
        expected = library.apply_chat_template(
            chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert tokens == expected["input_ids"]
        assert mask == [bool(one) for one in expected["assistant_masks"]]
