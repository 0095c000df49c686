"""Training and held-out data: of text and token files, of files of their own, and of folders that ``datasets`` saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import ConfigError, DataError
from penstock.train.config.config import from_mapping
from penstock.train.data.digest import DataDigest
from penstock.train.data.sources import OpenData, open_sources, open_whole
from penstock.train.data.tokenizer import ByteTokenizer, NumberTokenizer, Tokenizer, read_tokenizer
from tests.support import hf_folders

ROWS = ["the cat sat", "on a mat", "", "éü saw 3 dogs"]


def opened(tokenizer: Tokenizer | None = None, **keys: Any) -> OpenData:
    config = from_mapping({"data": {"sequence": 8, **keys}}).data
    return open_sources(config, tokenizer or ByteTokenizer(), 0, lambda name, share: None)


def text(root: Path, name: str, words: str) -> Path:
    (root / name).write_text(f"{words} " * 9)
    return root / name


def saved(root: Path, rows: list[Any], name: str = "saved", field: str = "text") -> Path:
    import datasets  # here: it takes seconds, in each worker that only collects

    table = [{field: row, "id": n} for n, row in enumerate(rows)]
    datasets.Dataset.from_list(table).save_to_disk(root / name)
    return root / name


def test_a_held_out_file_is_evaluated_on_and_everything_else_trained_on(tmp_path: Path):
    text(tmp_path, "train.txt", "a text to train on")
    dev = text(tmp_path, "dev.txt", "to evaluate on")
    data = opened(path=str(tmp_path), pattern="train*", held_out_path=str(dev))
    digest = DataDigest.of(data.training.corpus, data.held_out.corpus)
    assert [name for name, _ in digest.training.listed] == ["train.txt"]
    assert [name for name, _ in digest.held_out.listed] == ["dev.txt"]
    assert len(data.training.corpus) == 9 * 19 + 1
    read = data.held_out.corpus.read(0, len(data.held_out.corpus)).astype(np.uint8).tobytes()
    assert read == dev.read_bytes() + b"\0"


def test_errors_name_the_key(tmp_path: Path):
    train = str(text(tmp_path, "train.txt", "words"))
    with pytest.raises(DataError, match=r"train.txt is both training and held-out data; .*data.pattern"):
        opened(path=str(tmp_path), held_out_path=train)
    with pytest.raises(DataError, match=r"no file or folder /nowhere; data.held_out_path must name one"):
        opened(path=train, held_out_path="/nowhere")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DataError, match=r"the held-out files hold 6 tokens"):
        opened(path=train, held_out_path=str(tmp_path / "short.txt"))


def test_rows_of_a_data_set_follow_one_another_with_an_end_after_each(tmp_path: Path):
    config = from_mapping({"data": {"sequence": 4, "path": str(saved(tmp_path, ROWS))}}).data
    corpus = open_whole(config, ByteTokenizer(), lambda name, share: None).training.corpus
    expected = b"".join(row.encode() + b"\0" for row in ROWS if row)
    assert corpus.read(0, len(corpus)).tolist() == list(expected)
    folder = hf_folders.of_bytes(tmp_path)
    tokenizer = read_tokenizer(folder / "tokenizer.json", 260, hf_folders.BYTES_END, hf_folders.BYTES_START)
    corpus = open_whole(config, tokenizer, lambda name, share: None).training.corpus
    tokens = [token for row in ROWS if row for token in (*tokenizer.encode(row), hf_folders.BYTES_END)]
    assert corpus.read(0, len(corpus)).tolist() == tokens


def test_the_end_of_a_data_set_is_held_out(tmp_path: Path):
    rows = [f"row {n:03}" for n in range(50)]
    data = opened(path=str(saved(tmp_path, rows)), held_out=0.2)
    both = [data.training.corpus, data.held_out.corpus]
    assert [len(corpus) for corpus in both] == [320, 80]
    assert both[1].read(0, 7).tolist() == list(b"row 040")


def test_a_split_and_a_column_are_chosen_by_name(tmp_path: Path):
    import datasets

    parts = {"train": {"body": "aaaa bbbb"}, "validation": {"body": "cccc dddd"}}
    splits = {name: datasets.Dataset.from_list([row] * 9) for name, row in parts.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    data = opened(path=str(tmp_path / "splits"), text_field="body", split="validation", held_out=0.3)
    assert data.training.corpus.read(0, 4).tolist() == list(b"cccc")
    with pytest.raises(ConfigError, match=r"no split 'validaton' \(did you mean 'validation'\?\)"):
        opened(path=str(tmp_path / "splits"), text_field="body", split="validaton")
    with pytest.raises(DataError, match=r"no column 'text'.*data.text_field to the one with text: body"):
        opened(path=str(tmp_path / "splits"))


def test_rows_that_are_no_text_are_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"saved, row 2: text must be text, got 'None'"):
        opened(path=str(saved(tmp_path, ["a", None])))
    chats = saved(tmp_path, [[{"role": "user", "content": "hello"}]], "chats", "messages")
    with pytest.raises(DataError, match=r"no column 'text'.*penstock.PipelineTrainer"):
        opened(path=str(chats))
    with pytest.raises(ConfigError, match=r"the model has no tokenizer; data.path must then name .npy"):
        opened(NumberTokenizer(64), path=str(saved(tmp_path, ROWS, "again")))
    with pytest.raises(DataError, match=r"is empty; data.path must name text"):
        opened(path=str(saved(tmp_path, [""], "nothing")))
