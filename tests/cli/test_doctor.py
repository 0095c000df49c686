"""``penstock doctor`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli import group
from penstock.errors import ConfigError


def call(*words: object) -> Result:
    return CliRunner().invoke(group, ["doctor", *map(str, words)])


def test_alone_it_starts_two_processes_and_prints_one_object(tmp_path: Path):
    result = call("--json", "--folder", tmp_path)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["sound"]
    assert sorted(told["machines"]) == sorted(told["links"]) == sorted(told["folder"]) == ["0", "1"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_does_not_work_is_printed_with_why_and_what_to_do(tmp_path: Path):
    result = call("--ranks", 1, "--folder", tmp_path / "none")
    assert result.exit_code == 1
    assert (
        f"PROBLEM  rank 0: cannot write in {tmp_path / 'none'}: No such file or directory\n  why: "
        in result.output
    )
    assert f"do:  make {tmp_path / 'none'} a folder" in result.output
    assert result.output.endswith("1 problem\n")


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
