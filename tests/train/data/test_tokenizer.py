from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.base.errors import ConfigError, DataError
from penstock.train.data.tokenizer import ByteTokenizer, NumberTokenizer, read_tokenizer

VOCABULARY = {"<end>": 0, "def": 1, "return": 2, "x": 3, "[UNK]": 4}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_prompts_are_bytes_or_numbers():
    assert ByteTokenizer().encode("dé") == [100, 195, 169]
    assert ByteTokenizer().encode("") == NumberTokenizer(1000).encode("") == [0]
    assert NumberTokenizer(1000).encode("12 999") == [12, 999]
    for wrong in ("12 1000", "-1", "def"):
        with pytest.raises(ConfigError, match="must be token numbers from 0 to 999"):
            NumberTokenizer(1000).encode(wrong)


def test_bytes_that_are_no_text_are_shown_as_such():
    assert ByteTokenizer().decode([100, 195, 169, 255]) == "dé\ufffd"
    assert ByteTokenizer().decode([0, 65]) == "A"
    assert NumberTokenizer(1000).decode([12, 999]) == "12 999"


def test_a_tokenizer_reads_whole_texts_whatever_its_file_says_of_truncation_and_padding(path: Path):
    tokenizer = read_tokenizer(path, 5, end=0, start=None)
    assert tokenizer.encode("def x return x") == [1, 3, 2, 3]
    assert tokenizer.decode([1, 3, 0]) == "def x"
    first, second = tokenizer.encode_batch(["def x return", "x"])
    assert first.tolist() == [1, 3, 2]
    assert second.tolist() == [3]
    assert first.dtype == np.uint32


def test_an_empty_prompt_is_the_models_first_token(path: Path):
    assert read_tokenizer(path, 5, end=0, start=3).encode("") == [3]
    assert read_tokenizer(path, 5, end=2, start=None).encode("") == [2]
    assert read_tokenizer(path, 5, end=None, start=None).encode("") == [0]


def test_a_tokenizer_of_another_model_is_refused(path: Path):
    with pytest.raises(ConfigError, match="has tokens up to 4, but the model's vocab_size is 4"):
        read_tokenizer(path, 4, None, None)


def test_a_file_that_is_no_tokenizer_is_refused(path: Path):
    path.write_text("{}")
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        read_tokenizer(path, 5, None, None)


def test_without_the_package_it_is_said_what_to_install(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock-torch\[transformers\]'"):
        read_tokenizer(path, 5, None, None)


BROKEN = {
    "cannot read the tokenizer": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "cannot decode these tokens": {"decoder": {"type": "Strip", "content": "x", "start": 99, "stop": 99}},
}  # fmt: skip


@pytest.mark.parametrize("said", BROKEN)
def test_a_panic_of_the_library_is_one_line(path: Path, said: str):
    table = json.loads(path.read_text()) | BROKEN[said]
    path.write_text(json.dumps(table))
    with pytest.raises(DataError, match=said) as info:
        read_tokenizer(path, 5, end=0, start=None).decode([3])
    assert "\n" not in str(info.value)
