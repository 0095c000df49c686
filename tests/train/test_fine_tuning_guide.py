"""The commands and the code of docs/fine_tuning.md run as they are printed, in their order, on a small model."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from penstock.cli import group
from penstock.huggingface.adapters.supported import ADAPTER_WEIGHTS
from penstock.train.config.config import from_mapping
from tests.support import hf_folders
from tests.support.tiny_run import text_folder

PAGE = (Path(__file__).parents[2] / "docs" / "fine_tuning.md").read_text()
SMALL = (
    "train.batch=8", "schedule.microbatches=4", "data.sequence=12", "sample.length=4", "train.eval_batches=1",
    "train.report=false", "train.checkpoint_every=4", "runtime.threads=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all commands of the page have run."""
    folder = tmp_path_factory.mktemp("guide")
    hf_folders.folder(folder, "llama", tied=False).rename(folder / "my-model")
    text_folder(folder).rename(folder / "texts")
    lines = [line.strip() for line in PAGE.splitlines() if line.startswith("    penstock train ")]
    assert len(lines) == 7
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, line in enumerate(lines):
            words = shlex.split(line, comments=True)[1:]
            words = [word for word in words if word not in ("--ranks", "2")]  # ranks in threads start sooner
            more = () if "--resume" in words else (*SMALL, *named(line, number))
            outcome = CliRunner().invoke(group, [*words, *more])
            assert outcome.exit_code == 0, (line, outcome.output)
    return folder


def named(line: str, number: int) -> tuple[str, ...]:
    """Return how many steps a run takes, and its name, unless the page says so."""
    return ("train.steps=4", *(() if "train.name=" in line else (f"train.name=run-{number}",)))


@pytest.mark.slow
def test_the_commands_leave_what_the_page_says(guide: Path):
    runs = guide / "runs"
    for name in ("first", "second", "run-1"):
        assert (runs / name / ADAPTER_WEIGHTS).is_file()
        assert not (runs / name / "model.safetensors").exists()
    for name in ("whole", "run-0"):
        assert (runs / name / "model.safetensors").is_file()
        assert not (runs / name / ADAPTER_WEIGHTS).exists()


@pytest.mark.slow
def test_the_code_runs_from_top_to_bottom(guide: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(guide)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "a_page"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M):
        exec(compile(block, "fine_tuning.md", "exec"), names)
    assert (guide / "my-adapters" / ADAPTER_WEIGHTS).is_file()
    assert (guide / "my-merged-model" / "model.safetensors").is_file()


def test_the_section_is_one():
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.S | re.M)
    config = from_mapping({"model": {"path": "my-model"}, **tomllib.loads(text)})
    assert config.lora.enabled
    assert config.lora.alpha == 2 * config.lora.rank
