from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.show.report_page import UNKNOWN, read_facts

CONFIG = """
[model]
width = 128
layers = 6
[data]
sequence = 128
"""
START = {
    "time": "2026-11-23T10:00:00+0000", "host": "node-7", "command": "penstock train --ranks 2", "step": 0,
    "layout": "1f1b on 2 ranks", "device": "NVIDIA H100 80GB HBM3", "processes": 2, "threads": 1, "dtype": "bf16",
    "rated_flops": 989e12,
    "versions": {"penstock": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
}  # fmt: skip
METRICS = [
    {"kind": "train", "step": 10, "tokens_per_second": 500.0},
    {"kind": "train", "step": 20, "tokens_per_second": 1000.0},
    {"kind": "train", "step": 30, "tokens_per_second": float("nan")},
]


def facts(folder: Path, *starts: object, config: str = CONFIG, metrics=METRICS):
    (folder / "config.toml").write_text(config)
    (folder / "run.json").write_text(json.dumps({"starts": starts}))
    problems: list[str] = []
    return read_facts(folder, config, metrics, problems), problems


def test_a_run_tells_when_where_and_how_it_was_started(tmp_path: Path):
    read, problems = facts(tmp_path, START, START | {"step": 40, "time": "later"})
    assert problems == []
    assert dict(read.lines) == {
        "started": "later",
        "command": "penstock train --ranks 2",
        "host": "node-7",
        "device": "NVIDIA H100 80GB HBM3, bf16",
        "layout": "1f1b on 2 ranks, 2 processes, 1 CPU thread per rank",
        "versions": "penstock 0.1.0, torch 2.13.0, python 3.11.7",
        "resumed": "after step 40, later",
    }


def test_the_speed_is_the_runs_or_that_of_its_last_logged_steps(tmp_path: Path):
    assert facts(tmp_path, START)[0].tokens_per_second == 1000
    final = [*METRICS, {"kind": "final", "tokens_per_second": 800.0}]
    assert facts(tmp_path, START, metrics=final)[0].tokens_per_second == 800
    assert facts(tmp_path, START, metrics=[])[0].tokens_per_second is None


def test_mfu_is_the_models_flops_over_the_rating(tmp_path: Path):
    """Six FLOPs a weight of the matrices and token, and the scores of attention, over 989 TFLOP/s on each of two devices."""
    weights = 6 * (128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 352) + 128 * 256
    attention = 6 * 2 * 128 * 128
    per_token = 6 * (weights + attention)
    read, _ = facts(tmp_path, START)
    assert read.mfu == pytest.approx(1000 * per_token / (2 * 989e12), rel=0.05)
    assert [name for _, name in read.tiles] == ["tokens a second, all ranks", "MFU"]


def test_mfu_is_unknown_without_a_rating_and_without_the_models_flops(tmp_path: Path):
    for change in ({"rated_flops": None}, {"rated_flops": "989"}, {"processes": "two"}, {"processes": 0}):
        assert facts(tmp_path, START | change)[0].mfu is None
    assert facts(tmp_path, {})[0].mfu is None
    for config in ("", "[model", "[model]\nwidth = 'wide'\n[data]\nsequence = 8"):
        assert facts(tmp_path, START, config=config)[0].mfu is None


def test_a_damaged_record_is_named_and_a_missing_one_has_no_lines(tmp_path: Path):
    problems: list[str] = []
    assert read_facts(tmp_path, "", [], problems) == UNKNOWN
    assert problems == []
    for number, text in enumerate(("[", "[]", '{"starts": 3}', '{"starts": [1, "a"]}', "\udcff"), 1):
        (tmp_path / "run.json").write_bytes(text.encode(errors="surrogateescape"))
        assert read_facts(tmp_path, "", [], problems) == UNKNOWN
        assert len(problems) == number
        assert str(tmp_path / "run.json") in problems[-1]


def test_values_of_any_type_are_text_and_long_ones_and_many_starts_are_shortened(tmp_path: Path):
    odd = {"time": [1], "host": {"a": 1}, "versions": 3, "threads": None, "command": 7}
    assert dict(facts(tmp_path, odd)[0].lines) == {"started": "[1]", "command": "7", "host": "{'a': 1}"}
    starts = [START | {"step": n, "command": "x" * 10_000} for n in range(100)]
    lines = dict(facts(tmp_path, *starts)[0].lines)
    assert lines["command"] == "x" * 2000 + "..."
    assert lines["resumed"].count("after step") == 8
    assert "after step 99" in lines["resumed"]
