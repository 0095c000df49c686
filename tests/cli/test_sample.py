from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli import group
from penstock.huggingface.weights import save_part
from penstock.stage.module import StageModule
from penstock.train.config import file as config_file
from penstock.train.config.config import from_mapping
from penstock.train.model.llama import layers


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    model = {"width": 8, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 8}
    config = from_mapping({"model": model, "sample": {"prompt": "import ", "length": 6}})
    (tmp_path / "config.toml").write_text(config_file.dump(config))
    save_part(tmp_path, dict(StageModule(layers(config.model)).whole_model_parameters()), 0, 1)
    return tmp_path


def sample(*words: object) -> Result:
    result = CliRunner().invoke(group, ["sample", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result


def test_options_are_obeyed_and_the_prompt_comes_first(trained: Path):
    assert sample(trained, "def ", "--length", 0).stdout == "def \n"
    assert sample(trained, "--seed", 1).stdout == sample(trained, "--seed", 1).stdout
    assert sample(trained, "--seed", 1).stdout != sample(trained, "--seed", 2).stdout
    best = sample(trained, "--temperature", 0).stdout
    assert sample(trained, "--temperature", 0, "--seed", 5).stdout == best
    assert sample(trained, "--top-k", 1, "--seed", 6).stdout == best
    assert sample(trained, "def ").stdout.startswith("def ")
    assert sample(trained).stdout.startswith("import ")


def test_what_is_no_run_is_one_line_and_exit_code_2(tmp_path: Path, refused):
    assert f"{tmp_path} is not a run folder" in refused("sample", tmp_path)
