from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import penstock
from penstock.runtime.start.start_record import command_line, keep_start, start_of
from penstock.show.report_page import read_facts


def keep(run: Path, step: int = 0) -> list[str]:
    told: list[str] = []
    start = start_of(
        step=step, layout="1f1b on 2 ranks", device=torch.device("cpu"), processes=1, threads=2,
        dtype="fp32", rated=lambda device, dtype: {("cpu", "fp32"): 1e12}[device, dtype],
    )  # fmt: skip
    keep_start(run, told.append, start)
    return told


def test_every_start_is_kept(tmp_path: Path):
    assert keep(tmp_path) == keep(tmp_path, 40) == []
    first, second = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert (first["step"], second["step"]) == (0, 40)
    assert first["rated_flops"] == 1e12
    assert first["versions"]["torch"] == torch.__version__
    assert first["versions"]["penstock"] == penstock.__version__
    problems: list[str] = []
    lines = dict(read_facts(tmp_path, "", [], problems).lines)
    assert lines["layout"] == "1f1b on 2 ranks, threads of one process, 2 CPU threads per rank"
    assert lines["device"] == "cpu, fp32"
    assert problems == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"starts": 1}'])
def test_a_damaged_record_is_replaced(tmp_path: Path, text: str):
    (tmp_path / "run.json").write_text(text)
    assert keep(tmp_path) == []
    assert len(json.loads((tmp_path / "run.json").read_text())["starts"]) == 1


def test_a_failed_write_does_not_stop_training(tmp_path: Path):
    (told,) = keep(tmp_path / "missing")
    assert told.startswith(f"cannot write {tmp_path / 'missing' / 'run.json'}")
    assert told.endswith("Training continues")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["/opt/bin/penstock", "train", "train.name=my run"], "penstock train 'train.name=my run'"),
        (["/x/penstock/__main__.py", "train"], "python -m penstock train"),
        (["penstock", "\udcff"], "penstock '?'"),
    ],
)
def test_the_command_is_a_line_for_a_shell(arguments, line):
    assert command_line(arguments) == line
