"""The command's exit codes, as a shell sees them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import COMMANDS, group, main
from penstock.runtime.health.hang import Timeout
from penstock.runtime.workers.rank_threads import RankThreads

LONG = "n" * 5000
"""A path too long for any file system; even to look for it is an error."""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["checkpoint", "verify", "step-00000001"], 1),  # it is empty
        (["checkpoint", "list", "nothing"], 2),
        (["checkpoint", "nothing"], 2),
        (["checkpoint", "list", LONG], 2),
        (["checkpoint", "convert", "step-00000001", LONG, "--stages", "2"], 2),
        (["sample", LONG], 2),
        (["trace", LONG], 2),
        (["simulate", "1f1b", "-p", "2", "-m", "2", "--costs", LONG], 2),
        (["simulate", "zb-auto", "-p", "2", "-m", "2", "--option", "costs=" + "[" * 100_000], 2),
        (["schedule", "show", "1f1b", "-p", "4", "-m", "1000000000"], 2),
        (["simulate", "zb-auto", "-p", "1000000000", "-m", "1"], 2),
        (["simulate", "1f1b", "-p", "4", "-m", "1000000000"], 2),
        (["verify", "--ranks", "1000000", "--transport", "threads"], 2),
        (["verify", "--microbatches", "1000000000"], 2),
        (["doctor", "--ranks", "1000000"], 2),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_went_wrong_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words, code):
    monkeypatch.chdir(tmp_path)
    Path("step-00000001").mkdir()
    monkeypatch.setattr(sys, "argv", ["penstock", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == code


def test_torchrun_is_told_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    monkeypatch.setattr(sys, "argv", ["penstock", "sample", "nothing"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(told.read_text())["message"]["message"].startswith("ConfigError: ")


def test_what_went_well_ends_without_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["penstock", "schedule", "list"])
    main()
    assert "1f1b" in capsys.readouterr().out


def test_it_names_commands_that_exist():
    done = CliRunner().invoke(group, [])
    assert done.exit_code == 0
    named = re.findall(r"^    penstock (\w+)", done.stdout, re.M)
    assert named == ["train", "trace", "verify", "plan"]
    assert set(named) <= set(COMMANDS)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("word", "code", "begins"),
    [
        ("--help", 0, "Usage: "),
        ("--version", 0, "penstock, version"),
        ("nothing", 2, ""),
        ("--nothing", 2, ""),
    ],
)
def test_help_version_and_what_is_no_command_do_not_name_the_first_commands(
    word: str, code: int, begins: str
):
    done = CliRunner().invoke(group, [word])
    assert (done.exit_code, done.stdout[: len(begins) or None]) == (code, begins)
    assert "penstock train train.name=first" not in done.stdout


def test_ranks_that_wait_for_a_job_do_not_end_the_process_at_once(refused):
    waiting = RankThreads(2, Timeout(60.0))
    refused("trace", "nothing")
    waiting.close()
