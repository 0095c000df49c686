"""The page of all keys, what `penstock config` prints, and hints for misspelt keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.train.config.config import Config, nearest_key
from penstock.train.config.config_keys import config_keys, keys_page, keys_text

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
    [("lr", "no key lr (did you mean optim.lr?)"), ("optin", "did you mean optim?"), ("x", "no key x;")],
)
def test_an_unknown_key_is_refused_with_the_nearest(name: str, said: str):
    with pytest.raises(ConfigError) as refused:
        keys_text([name])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("--model.path", "model.path"),
        ("--path", "model.path or data.path"),
        ("train.step", "train.steps"),
        ("train.lr", "optim.lr"),
        ("stpes", "train.steps"),
        ("colour", ""),
    ],
)
def test_a_name_suggests_keys(name: str, near: str):
    assert nearest_key(name) == (f" (did you mean {near}?)" if near else "")
