"""``penstock doctor`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.base import host
from penstock.base.errors import ConfigError
from penstock.base.output_files import signed
from penstock.cli import group
from penstock.plan.cluster import read_cluster


def call(*words: object) -> Result:
    return CliRunner().invoke(group, ["doctor", *map(str, words)])


@pytest.mark.slow
def test_alone_it_starts_two_processes_and_prints_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    result = call("--json", "--folder", tmp_path)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["sound"]
    assert sorted(told["machines"]) == sorted(told["links"]) == sorted(told["folder"]) == ["0", "1"]
    assert [one["threads"] for one in told["machines"].values()] == [max(1, host.cores() // 2)] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_does_not_work_is_printed_with_why_and_what_to_do(tmp_path: Path):
    result = call("--ranks", 1, "--folder", tmp_path / "none")
    assert result.exit_code == 1
    none = tmp_path / "none"
    assert f"PROBLEM  rank 0: cannot write in {none}: No such file or directory\n  why: " in result.output
    assert f"do:  make {none} a folder" in result.output
    assert result.output.endswith("1 problem\n")
    result = call("--ranks", 1, "--folder", none, "--measure", tmp_path / "mine.toml")
    assert result.exit_code == 1
    assert not (tmp_path / "mine.toml").exists()
    assert "nothing was measured" in result.output


def test_bad_input_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    assert call("--ranks", 0).exit_code == 2
    assert call("--timeout", 0).exit_code == 2
    assert call("--timeout", "nan").exit_code != 0
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    error = call("--ranks", 3).exception
    assert isinstance(error, ConfigError)
    assert "leave --ranks out" in str(error)
    monkeypatch.setenv("RANK", "7")
    assert "are not a rank below" in str(call().exception)


@pytest.mark.exhaustive  # beside what ranks of a launcher measure
def test_a_measured_cluster_is_written_and_shown(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(signed("# Measured by penstock doctor with torch 2.0 on an older machine.\n"))
    result = call("--measure", path)
    assert result.exit_code == 0, result.output
    assert f"written to {path}\n" in result.output
    assert "matrix products: fp32" in result.output
    assert "links within a node" in result.output
    assert read_cluster(path).devices == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_cluster_file_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path):
    (tmp_path / "mine.toml").write_text("[device]\n")
    measured = signed("# Measured by penstock doctor with torch 2.0 on 2 CPUs.\nnodes = 1\n")
    (tmp_path / "edited.toml").write_text(measured.replace("nodes = 1", "nodes = 2"))
    for path, message in (
        (tmp_path / "none" / "a.toml", f"there is no folder {tmp_path / 'none'}"),
        (tmp_path / "a.txt", "end in .toml"),
        (tmp_path / "mine.toml", "was not written by penstock doctor"),
        (tmp_path / "edited.toml", "was edited after penstock doctor wrote it"),
    ):
        error = call("--measure", path).exception
        assert isinstance(error, ConfigError)
        assert message in str(error)
