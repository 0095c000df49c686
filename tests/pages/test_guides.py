"""The guides run as they are printed: code, commands and what they print. Commands of other machines at least exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from tests.support.documentation import DOCS
from tests.support.page import Reader, require_options

GUIDES = ["memory.md", "which_parallelism.md", "clusters.md", "start.md"]


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_runs_from_top_to_bottom(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Reader(tmp_path, skip=("pip",)).follow(page)


@pytest.mark.parametrize("page", ["memory.md", "which_parallelism.md", "clusters.md", "troubleshooting.md"])
def test_every_command_in_the_text_has_the_options_that_are_written(page: str):
    text = (DOCS / page).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    commands = [*re.findall(r"`([^`\n]*\bpenstock [^`\n]*)`", text), *lines]
    found = 0
    for command in commands:
        words = shlex.split(command, comments=True)
        if "penstock" in words and len(words) > words.index("penstock") + 1:
            require_options(words[words.index("penstock") + 1 :])
            found += 1
    assert found >= 3


def test_an_option_that_does_not_exist_is_noticed():
    with pytest.raises(click.UsageError):
        require_options(["train", "my.toml", "--no-such"])
    with pytest.raises(click.UsageError):
        require_options(["trains"])
