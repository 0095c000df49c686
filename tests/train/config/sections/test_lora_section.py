from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.train.config import file as config_file
from penstock.train.config.config import from_mapping
from penstock.train.config.optim_defaults import FINE_TUNING, LORA_LR

MODEL = {"path": "my-model"}


def test_adapters_have_a_higher_learning_rate_unless_it_is_given():
    assert from_mapping({"model": MODEL}).optim.lr == FINE_TUNING["lr"]
    assert from_mapping({"model": MODEL, "lora": {"rank": 8}}).optim.lr == LORA_LR
    assert from_mapping({"model": MODEL, "lora": {"path": "a"}, "optim": {"lr": 0.5}}).optim.lr == 0.5


def test_names_are_a_list_or_a_text_with_commas():
    for names in ("q_proj,v_proj", ["q_proj", "v_proj"]):
        config = from_mapping({"model": MODEL, "lora": {"rank": 8, "target_modules": names}})
        assert config.lora.target_modules == "q_proj,v_proj"


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"rank": 8},
        {"rank": 8, "alpha": 12.5, "dropout": 0.1, "modules_to_save": ["norm"], "save": "merged"},
        {"path": "adapters", "save": "merged"},
    ],
)
def test_what_a_run_folder_keeps_is_read_as_the_same_config(lora: dict, tmp_path: Path):
    config = from_mapping({"model": MODEL, "lora": lora})
    (tmp_path / "config.toml").write_text(config_file.dump(config))
    assert config_file.load(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"lora": {"rank": 8}}, r"set model\.path to its folder"),
        ({"lora": {"rank": 8}, "model": {"config": "config.json"}}, r"set model\.path to its folder"),
        ({"model": MODEL, "lora": {"alpha": 3.0}}, r"lora\.alpha is given without adapters; set lora\.rank"),
        ({"model": MODEL, "lora": {"save": "merged"}}, r"lora\.save is given without adapters"),
        ({"model": MODEL, "lora": {"path": "a", "rank": 8}}, r"lora\.rank is given beside lora\.path"),
        ({"model": MODEL, "lora": {"rank": 8}, "parallel": {"tp": 2}}, r"parallel\.tp must be 1 with \[lora\]"),
        ({"model": MODEL, "lora": {"rank": -1}}, r"lora\.rank must be greater than or equal to 0, got -1"),
        ({"model": MODEL, "lora": {"rank": 8, "dropout": 1.0}}, r"lora\.dropout must be less than 1, got 1\.0"),
        ({"model": MODEL, "lora": {"rank": 8, "bias": "some"}}, r"lora\.bias must be 'none', 'all' or 'lora_only'"),
        ({"model": MODEL, "lora": {"rank": 8, "alfa": 3}}, r"no key lora\.alfa \(did you mean 'alpha'\?\)"),
        ({"model": MODEL, "lora": {"rank": 8, "target_modules": 3}}, r"lora\.target_modules must be text in quotes"),
        ({"model": MODEL, "lora": {"rank": 8, "target_modules": ""}}, r"lora\.target_modules must be all-linear, or names"),
        ({"model": MODEL, "lora": {"rank": 0, "alpha": 1.0}}, r"lora\.alpha is given without adapters"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_what_to_do(tables: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        from_mapping(tables)
