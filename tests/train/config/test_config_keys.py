"""The page of all keys, what `penstock config` prints, and hints for keys of other names: misspelt, or of other tools."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.train.config import hints
from penstock.train.config.config import HINTS, Config
from penstock.train.config.config_keys import config_keys, keys_page, keys_text
from penstock.train.config.file import load

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == keys_page(), "penstock config --markdown > docs/config.md"


def test_every_key_has_a_meaning_and_allowed_values():
    sections = config_keys()
    assert list(sections) == [section.name for section in dataclasses.fields(Config)]
    for section, (text, keys) in sections.items():
        assert text
        assert [key.key for key in keys] == [f.name for f in dataclasses.fields(getattr(Config(), section))]
        for key in keys:
            assert key.allowed, key
            assert len(key.meaning) > 10, key
            assert "``" not in key.meaning


def test_keys_and_sections_are_printed_by_name():
    assert keys_text(["optim.lr"]) == "optim.lr = 0.004\n    number above 0\n    highest learning rate.\n"
    text = keys_text(["train.steps", "runtime"])
    assert text.startswith("train.steps = 600\n    whole number at least 1\n")
    assert 'runtime.precision = "fp32"\n    "fp32", "bf16", "bf16-weights", "fp16"\n' in text
    assert "optim." not in text
    assert len(keys_text([])) > len(text)


@pytest.mark.parametrize(
    ("name", "said"),
    [("lr", "no key lr (did you mean optim.lr?)"), ("optin", "did you mean 'optim'"), ("x", "no key x;")],
)
def test_an_unknown_key_is_refused_with_the_nearest(name: str, said: str):
    with pytest.raises(ConfigError) as refused:
        keys_text([name])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("--batch-size", ["train.batch"]),
        ("--learning_rate", ["optim.lr"]),
        ("--model.path", ["model.path"]),
        ("--path", ["model.path", "data.path"]),
        ("--gradient-accumulation-steps", ["train.accumulate"]),
        ("--bf16", ["runtime.precision=bf16"]),
        ("--lr-warmup-iters", ["optim.warmup=SHARE_OF_STEPS"]),
        ("--min-lr", ["optim.final_lr=SHARE_OF_LR"]),
        ("--use-distributed-optimizer", ["parallel.zero=true"]),
        ("--optim.betas", ["optim.beta1"]),
        ("train.step", ["train.steps"]),
        ("optim.learning_rate", ["optim.lr"]),
        ("runtime.autocast", ["runtime.precision"]),
        ("stpes", ["train.steps"]),
        ("learnign_rate", ["optim.lr"]),
        ("colour", []),
    ],
)
def test_a_name_suggests_keys(name: str, keys: list[str]):
    assert HINTS.nearest(name)[: len(keys)] == keys
    assert bool(HINTS.nearest(name)) == bool(keys)


def test_every_name_of_other_tools_leads_to_a_key_that_exists():
    tables = {
        section: {f.name for f in dataclasses.fields(table)} for section, table in vars(Config()).items()
    }
    for text in vars(hints)["_NAMES"]:
        section, key = text.partition("=")[0].split(".")[:2]
        assert key in tables[section], text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("train.step=2", r"no key train.step \(did you mean 'steps'.*\), as in train.steps=2; \[train\]"),
        ("train.lr=0.1", r"no key train.lr \(did you mean 'optim.lr'\?\), as in optim.lr=0.1; "),
        ("steps=2", r"got 'steps=2'; did you mean train.steps=2\?"),
        ("runtime.bf16=true", r"as in runtime.precision=bf16; \[runtime\]"),
    ],
)
def test_an_unknown_key_says_what_to_write(given: str, said: str):
    with pytest.raises(ConfigError, match=said):
        load(None, [given])
