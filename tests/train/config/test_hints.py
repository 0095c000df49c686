"""Hints for keys that are misspelt, in another section, or named as in other tools."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.base.errors import ConfigError
from penstock.train.config import hints
from penstock.train.config.config import HINTS, Config
from penstock.train.config.file import load


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
