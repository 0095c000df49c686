from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.train.config.config import Config, from_mapping
from penstock.train.config.file import dump, load
from penstock.train.config.resolve import resolve


def test_a_file_is_read_and_overrides_win(tmp_path: Path):
    path = tmp_path / "c.toml"
    path.write_text("[train]\nsteps = 50\nseed = 1\n[schedule]\nname = 'gpipe'\n")
    config = load(
        path, ["train.seed=3", "train.seed=2", "train.name=first", "optim.lr = 1e-3", 'data.path="a b"']
    )
    assert (config.train.steps, config.train.seed, config.train.name) == (50, 2, "first")
    assert (config.schedule.name, config.optim.lr, config.data.path) == ("gpipe", 1e-3, "a b")


def test_text_goes_without_quotes_and_may_hold_anything():
    assert load(None, ["sample.prompt=import os\nimport re"]).sample.prompt == "import os\nimport re"
    assert load(None, ["sample.prompt=a=b"]).sample.prompt == "a=b"
    assert load(None, ["data.path="]).data.path == ""


@pytest.mark.parametrize(
    "wrong", ["train.steps", "steps=3", "=3", "train.=3", ".steps=3", "train.\udcff=3", "\udcff.a=3"]
)
def test_a_malformed_override_is_refused(wrong: str):
    with pytest.raises(ConfigError, match=r"an override must be section.key=value"):
        load(None, [wrong])


def test_an_override_without_a_value_unsets_a_key_that_is_unset_by_default(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('[parallel]\nstore = "host"\nwindow = 1\n')
    with pytest.raises(ConfigError, match=r"window = 1 needs .* and store 'none'; leave window out"):
        load(path, ["parallel.store=none"])
    assert load(path, ["parallel.store=none", "parallel.window="]).parallel.window is None
    assert load(path, ["train.name="]).train.name == ""  # text may be empty
    with pytest.raises(ConfigError, match=r"train\.steps"):
        load(path, ["train.steps="])


def test_an_override_goes_through_the_checks():
    with pytest.raises(ConfigError, match=r"no key train.step "):
        load(None, ["train.step=3"])
    with pytest.raises(ConfigError, match=r"train.steps must be a valid integer, got 'many'"):
        load(None, ["train.steps=many"])
    with pytest.raises(ConfigError, match="must be a valid integer"):
        load(None, ["train.steps=" + "[" * 100_000])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read the config .*c.toml: No such file"),
        (b"steps = = 3", "c.toml is not a TOML file"),
        (b"\xff\xfe\x00", "c.toml is not a TOML file"),
        (b"[train]\nsteps = " + b"9" * 5000, "c.toml is not a TOML file"),
        (b"train = 3", "train must be a table"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes | None, said: str):
    if content is not None:
        (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load(tmp_path / "c.toml", ["train.steps=3"])


def test_what_is_dumped_reads_back_as_the_same_config(tmp_path: Path):
    theirs = [from_mapping({"model": {key: "some/where"}}) for key in ("path", "config")]
    for config in (Config(), resolve(Config(), 4), *theirs):
        (tmp_path / "c.toml").write_text(dump(config), "utf-8")
        assert load(tmp_path / "c.toml") == config
    assert "pp" not in tomllib.loads(dump(Config()))["parallel"]  # what is not set is left out


@settings(max_examples=30)
@given(
    prompt=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(0, 2**31 - 1),
)
def test_any_value_survives_the_way_out_and_in(prompt: str, lr: float, seed: int):
    config = from_mapping({"sample": {"prompt": prompt}, "optim": {"lr": lr}, "train": {"seed": seed}})
    assert from_mapping(tomllib.loads(dump(config))) == config
