"""The guides run as they are printed: code, commands and what they print. Commands of other machines at least exist."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import click
import pytest
import torch

from penstock.schedule.families import lookup
from penstock.train.config.config import from_mapping
from tests.support.documentation import DOCS, ROOT, blocks, llama_3_8b
from tests.support.lanes import exhaustive
from tests.support.page import SHORTER, Reader, require_options

FEWER_STEPS = {"range(40)": "range(2)", "% 20": "% 1"}
"""Of the program on the first page."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        "memory.md", "which_parallelism.md", "clusters.md", "start.md", "models.md", "planning.md",
        "more_model_than_memory.md", "unlike_devices.md", *exhaustive("find_the_wrong_tensor.md"),
    ],
)  # fmt: skip
def test_a_guide_runs_from_top_to_bottom(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    llama_3_8b(tmp_path)
    # Commands of planning.md, which need a folder of files, run in tests/site/test_page_commands.py.
    skip = ("pip", *(["penstock"] if page == "planning.md" else []))
    shorter = (*SHORTER, *(["data.sequence=32"] if page == "start.md" else []))
    Reader(tmp_path, skip, shorter, FEWER_STEPS).follow(page)
    if page == "more_model_than_memory.md":
        assert (tmp_path / "store.svg").read_text() == (DOCS / "schedules" / "store.svg").read_text()


@pytest.mark.exhaustive
def test_every_command_of_the_page_on_training_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    reader = Reader(tmp_path, shorter=())
    reader.follow("training.md")
    assert len(reader.outputs) == 5


@pytest.mark.slow
def test_an_own_schedule_is_written_checked_drawn_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lookup, "_registered", {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "late", raising=False)
    Reader(tmp_path).follow("own_schedule.md")
    monkeypatch.delitem(sys.modules, "late")
    drawn, in_docs = (
        re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text())
        for path in (tmp_path / "late.svg", DOCS / "schedules" / "late-weights.svg")
    )
    assert drawn == in_docs
    assert "Late weight gradients" in drawn


def test_the_program_of_the_first_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    (program,) = (block.text for block in blocks(DOCS / "start.md") if block.kind == "python")
    for text, other in FEWER_STEPS.items():
        program = program.replace(text, other)
    (tmp_path / "mine.py").write_text(program)
    runpy.run_path("mine.py")
    assert re.fullmatch(r"(step [12]  loss \d\.\d{4}\n){2}", capsys.readouterr().out)
    assert "blocks.3.mlp.2.weight" in torch.load("gpt.pt")


def test_the_tables_of_the_page_on_training_are_a_config():
    (block,) = (block.text for block in blocks(DOCS / "training.md") if block.kind == "toml")
    assert from_mapping(tomllib.loads(block)).optim.arguments == {"momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize("page", ["memory.md", "which_parallelism.md", "clusters.md", "troubleshooting.md"])
def test_every_command_in_the_text_has_the_options_that_are_written(page: str):
    text = (DOCS / page).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    found = 0
    for command in (*re.findall(r"`([^`\n]*\bpenstock [^`\n]*)`", text), *lines):
        words = shlex.split(command, comments=True)
        if "penstock" in words and len(words) > words.index("penstock") + 1:
            require_options(words[words.index("penstock") + 1 :])
            found += 1
    assert found >= 3


def test_an_option_that_does_not_exist_is_noticed():
    for words in (["train", "my.toml", "--no-such"], ["trains"]):
        with pytest.raises(click.UsageError):
            require_options(words)
