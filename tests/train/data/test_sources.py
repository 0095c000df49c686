"""Held-out data of its own: files or a split that are evaluated on, while all of the training data is trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import ConfigError, DataError
from penstock.train.config.config import from_mapping
from penstock.train.config.file import dump, load
from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.digest import DataDigest
from penstock.train.data.sources import OpenData, open_sources
from penstock.train.data.token_cache import TokenCache
from penstock.train.data.tokenizer import ByteTokenizer
from tests.support import records


def opened(**keys: Any) -> OpenData:
    config = from_mapping({"data": {"sequence": 96, **keys}}).data
    return open_sources(config, ByteTokenizer(), TokenCache(None, ByteTokenizer(), None), 0)


def firsts(samples: Any) -> set[tuple[int, ...]]:
    return {tuple(row.tokens.tolist()) for row in samples.once()}


def lines(root: Path, name: str, count: int, seed: int) -> Path:
    return records.write_lines(root / name, records.completions(count, seed))


def alone(path: Path) -> set[tuple[int, ...]]:
    """Rows of all records of a file."""
    both = opened(path=str(path))
    return firsts(both.training) | firsts(both.held_out)


def test_a_held_out_file_is_evaluated_on_and_everything_else_trained_on(tmp_path: Path):
    train, dev = lines(tmp_path, "train.jsonl", 40, 0), lines(tmp_path, "dev.jsonl", 9, 1)
    data = opened(path=str(tmp_path), pattern="train*", held_out_path=str(dev))
    assert firsts(data.training) == alone(train)
    assert firsts(data.held_out) == alone(dev)
    digest = DataDigest.of(*data.tokens)
    assert [name for name, _ in digest.training.listed] == ["train.jsonl"]
    assert [name for name, _ in digest.held_out.listed] == ["dev.jsonl"]
    assert data.training.per_epoch == 40
    text = tmp_path / "text.txt"
    text.write_text("a text to train on, of some length\n" * 9)
    data = opened(path=str(text), held_out_path=str(dev))
    assert data.corpus is not None
    assert len(data.corpus) == 9 * 35 + 1
    assert data.held_out.masked


def test_several_held_out_files_of_several_formats_are_read_one_after_the_other(tmp_path: Path):
    one, two = lines(tmp_path, "one.jsonl", 5, 1), lines(tmp_path, "two.jsonl", 2, 2)
    (tmp_path / "text.txt").write_text("x" * 96 * 9_000)
    sources = [{"path": str(lines(tmp_path, f"{n}.jsonl", 20, n)), "weight": n} for n in (3, 4)]
    held_out = f"{one}, {tmp_path / 'text.txt'},{two}"
    data = opened(sources=sources, held_out_path=held_out)
    assert firsts(data.held_out) >= alone(one) | alone(two)
    assert sum(1 for _ in data.held_out.once()) == 5 + 9_000 + 2
    assert len(data.held_out.spread(64)) == 64
    assert data.training.per_epoch == 40
    names = [name for name, _ in DataDigest.of(*data.tokens).held_out.listed]
    assert names == ["1:one.jsonl", "2:text.txt", "3:two.jsonl"]
    assert data.summary.startswith("2 sources: 42.9% 20 training completions")


def test_a_split_is_held_out(tmp_path: Path, datasets: ModuleType):
    rows = records.texts(12)
    parts = {"train": rows[:8], "validation": rows[8:]}
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list(part) for name, part in parts.items()})
    splits.save_to_disk(tmp_path / "saved")
    data = opened(path=str(tmp_path / "saved"), held_out_split="validation")
    assert len(firsts(data.training)) == 8
    assert len(firsts(data.held_out)) == 4
    other = opened(
        path=str(lines(tmp_path, "a.jsonl", 5, 0)),
        held_out_path=str(tmp_path / "saved"),
        held_out_split="train",
    )
    assert firsts(other.held_out) == firsts(data.training)
    with pytest.raises(
        DataError, match=r"saved, split 'train', is both training and held-out data; .*held_out_split"
    ):
        opened(path=str(tmp_path / "saved"), held_out_split="train")
    with pytest.raises(
        DataError, match=r"held_out_split is 'dev', and .*a.jsonl is not a folder of several splits"
    ):
        opened(path=str(tmp_path / "a.jsonl"), held_out_split="dev")


def test_held_out_data_that_is_trained_on_is_refused_or_told(tmp_path: Path):
    train = lines(tmp_path, "train.jsonl", 20, 0)
    with pytest.raises(DataError, match=r"train.jsonl is both training and held-out data; .*data.pattern"):
        opened(path=str(tmp_path), held_out_path=str(train))
    records.write_lines(tmp_path / "dev.jsonl", records.completions(20, 0)[:3] + records.completions(4, 9))
    data = opened(path=str(train), held_out_path=str(tmp_path / "dev.jsonl"))
    assert "3 of 7 held-out records are also training records" in data.notes
    assert not any("also training" in note for note in opened(path=str(train)).notes)


def test_errors_name_the_key(tmp_path: Path):
    train = str(lines(tmp_path, "train.jsonl", 20, 0))
    with pytest.raises(DataError, match=r"no file or folder /nowhere; data.held_out_path must name one"):
        opened(path=train, held_out_path="/nowhere")
    for key in ("held_out_path", "held_out_split"):
        with pytest.raises(
            ConfigError, match=rf"data.held_out is 0.1 and data.{key} is 'x'; give one of them"
        ):
            opened(path=train, held_out=0.1, **{key: "x"})
    with pytest.raises(ConfigError, match=r"data.held_out_path must be a file or folder, or several"):
        opened(path=train, held_out_path=" , ")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DataError, match=r"the held-out files hold 6 tokens"):
        opened(path=train, held_out_path=str(tmp_path / "short.txt"))


def test_the_kept_config_can_be_read_again(tmp_path: Path):
    config = from_mapping({"data": {"held_out_path": "dev.jsonl"}})
    (tmp_path / "config.toml").write_text(dump(config))
    assert load(tmp_path / "config.toml") == config


def test_of_a_share_nothing_has_changed(tmp_path: Path):
    path = lines(tmp_path, "train.jsonl", 40, 0)
    data = open_sources(
        replace(DataConfig(), path=str(path)), ByteTokenizer(), TokenCache(None, ByteTokenizer(), None), 0
    )
    training, held_out = data.tokens
    assert (len(data.notes), data.training.per_epoch) == (1, 38)
    assert np.intersect1d(training.hashes, held_out.hashes).size == 0
