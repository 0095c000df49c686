"""``penstock`` without arguments says what to do next."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from penstock.cli import COMMANDS, group


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
