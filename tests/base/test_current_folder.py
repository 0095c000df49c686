"""A file of the current folder is never taken for a module of Python or of a library, in any process of a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lanes import exhaustive
from tests.support.tiny_run import text_folder

pytestmark = pytest.mark.slow

NAMES = ("random", "torch", "numpy", "click", "tempfile", "json", "multiprocessing", "transformers", "bokeh")
TINY = [
    "model.width=16", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.hidden=16", "data.path=text",
    "data.sequence=12", "schedule.microbatches=2", "train.steps=1", "train.batch=4", "train.eval_batches=1",
    "train.name=one", "sample.length=4",
]  # fmt: skip
OWN = """
import random
import torch
import penstock
from own_helper import NOTE


class Notes(penstock.Callback):
    def on_end(self, event):
        open("note", "w").write(f"{NOTE} {random.random() < 1}")


def build(ranks, microbatches):
    return penstock.build_schedule("gpipe", ranks, microbatches)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files of the names of modules, which leave a mark when they are run, and with modules of its own."""
    text_folder(tmp_path)
    for name in NAMES:
        mark = f"open({str(tmp_path / 'executed')!r}, 'a').write('{name} ')"
        (tmp_path / f"{name}.py").write_text(f"{mark}\nraise SystemExit('executed')\n")
    (tmp_path / "own_hooks.py").write_text(OWN)
    (tmp_path / "own_helper.py").write_text("NOTE = 'own'\n")
    return tmp_path


OWN_PARTS = ("train.callbacks=own_hooks:Notes", "schedule.name=own_hooks:build")
VERIFY = (
    "--ranks", "2", "--microbatches", "2", "--schedule", "own_hooks:build", "--transport", "processes", "--steps", "1",
)  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["train", *TINY, *OWN_PARTS],
        ["verify", *VERIFY],
        *exhaustive(["doctor", "--ranks", "2"]),
    ],
    ids=lambda words: f"{words[0]} {words[-2].lstrip('-')}",
)
def test_files_named_like_modules_are_not_run(folder: Path, words: list[str]):
    command = [sys.executable, "-m", "penstock", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    marks = folder / "executed"
    assert not marks.exists(), f"{marks.read_text()}: {done.stderr}"
    assert done.returncode == 0, done.stderr
    if OWN_PARTS[0] in words:
        assert (folder / "note").read_text() == "own True"
