from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.base.run_lock import LOCK
from penstock.trace.metrics_writer import MetricsWriter, final_values, go_back
from penstock.train.config.config import Config
from penstock.train.config.file import load
from penstock.train.config.sections import TrainConfig
from penstock.train.run_folder import choose, create


def test_choosing_writes_nothing_and_without_a_name_takes_the_time(tmp_path: Path):
    assert choose(TrainConfig(folder=str(tmp_path / "runs"), name="a")) == tmp_path / "runs" / "a"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}", choose(TrainConfig(folder=str(tmp_path))).name)
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_holds_its_config_and_an_existing_one_is_refused(tmp_path: Path):
    create(tmp_path / "deep" / "a", Config())
    assert load(tmp_path / "deep" / "a" / "config.toml") == Config()
    with pytest.raises(ConfigError, match=r"the run folder .*a already exists; choose another train.name"):
        choose(TrainConfig(folder=str(tmp_path / "deep"), name="a"))
    with pytest.raises(ConfigError, match=r"cannot make the run folder .*a: File exists"):
        create(tmp_path / "deep" / "a", Config())


def test_a_folder_with_a_lock_alone_is_that_of_a_run_that_has_not_begun(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / LOCK).touch()
    assert choose(TrainConfig(folder=str(tmp_path), name="a")) == tmp_path / "a"
    create(tmp_path / "a", Config())
    with pytest.raises(ConfigError, match="already exists"):
        choose(TrainConfig(folder=str(tmp_path), name="a"))


def test_metrics_are_on_disk_line_by_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path) as metrics:
        metrics.write("train", step=1, loss=0.5)
        (line,) = [json.loads(line) for line in path.read_text().splitlines()]
        assert datetime.now(UTC) - datetime.fromisoformat(line.pop("time")) < timedelta(minutes=10)
        assert line == {"kind": "train", "step": 1, "loss": 0.5}
        metrics.write("final", step=2, bigram_bits=None)
    assert len(path.read_text().splitlines()) == 2


def test_going_back_drops_lines_that_are_no_metrics(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    good, deep = b'{"kind": "train", "step": 1}\n', b"[" * 100_000 + b"\n"
    no_step, later = (b'{"kind": "train", "step": %s}\n' % step for step in (b'"two"', b"3"))
    path.write_bytes(good + deep + no_step + later + b"[]\n" + deep)
    assert final_values(tmp_path) is None
    go_back(tmp_path, 2)
    assert path.read_bytes() == good


def test_ranks_that_do_not_lead_write_no_metrics(tmp_path: Path):
    with MetricsWriter(None) as metrics:
        metrics.write("train", step=1)
    assert list(tmp_path.iterdir()) == []
