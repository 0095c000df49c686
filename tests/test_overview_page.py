"""The commands of docs/overview.md print what it says, and its code runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import group

PAGE = (Path(__file__).parents[1] / "docs" / "overview.md").read_text()
COMMANDS = re.findall(r"^```text\n\$ (penstock [^\n]*)\n(.*?)^```", PAGE, re.S | re.M)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(*each, marks=pytest.mark.slow if "verify" in each[0] else [], id=each[0][:40])
        for each in COMMANDS
    ],
)
def test_a_command_prints_what_the_page_shows(command: str, shown: str):
    done = CliRunner().invoke(group, shlex.split(command)[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        line.rstrip() for line in shown.splitlines()
    ]


def test_the_page_has_these_commands():
    assert [command.split()[1] for command, _ in COMMANDS] == ["simulate", "simulate", "verify"]


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M):
        exec(compile(block, "overview.md", "exec"), {})
    assert (tmp_path / "step.npz").is_file()
