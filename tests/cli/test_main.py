"""The command's exit codes, as a shell sees them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import COMMANDS, group, main


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["checkpoint", "verify", "step-00000001"], 1),  # it is empty
        (["checkpoint", "list", "nothing"], 2),
        (["checkpoint", "nothing"], 2),
        (["checkpoint", "list", "n" * 5000], 2),
        (["checkpoint", "convert", "step-00000001", "n" * 5000, "--stages", "2"], 2),
        (["sample", "n" * 5000], 2),
        (["trace", "n" * 5000], 2),
        (["simulate", "1f1b", "-p", "2", "-m", "2", "--costs", "n" * 5000], 2),
        (["simulate", "zb-auto", "-p", "2", "-m", "2", "--option", "costs=" + "[" * 100_000], 2),
        (["schedule", "show", "1f1b", "-p", "4", "-m", "1000000000"], 2),
        (["simulate", "zb-auto", "-p", "1000000000", "-m", "1"], 2),
        (["simulate", "1f1b", "-p", "4", "-m", "1000000000"], 2),
        (["verify", "--ranks", "1000000", "--transport", "threads"], 2),
        (["verify", "--microbatches", "1000000000"], 2),
        (["doctor", "--ranks", "1000000"], 2),
    ],
    ids=[
        "a command's own",
        "bad input",
        "bad usage",
        *(
            f"a path of 5,000 characters to {command}"
            for command in ("list", "convert", "sample", "trace", "simulate")
        ),
        "an option nested too deeply",
        *(
            f"{command}: too large"
            for command in ("show", "zb-auto", "simulate", "verify", "verify", "doctor")
        ),
    ],
)
def test_what_went_wrong_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words, code):
    monkeypatch.chdir(tmp_path)
    Path("step-00000001").mkdir()
    monkeypatch.setattr(sys, "argv", ["penstock", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == code


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


@pytest.mark.parametrize(("words", "begins"), [(["--help"], "Usage: "), (["--version"], "penstock, version")])
def test_help_and_version_are_what_they_were(words: list[str], begins: str):
    done = CliRunner().invoke(group, words)
    assert (done.exit_code, done.stdout.startswith(begins)) == (0, True)
    assert "penstock train train.name=first" not in done.stdout


@pytest.mark.parametrize("words", [["nothing"], ["--nothing"]])
def test_what_is_no_command_is_refused(words: list[str]):
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 2
    assert done.stdout == ""
