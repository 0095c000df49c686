"""The walk through `penstock train` in docs/training.md runs as it is printed."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from penstock.train.config.config import from_mapping
from tests.support.commands import python

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "training.md").read_text()
COMMAND = re.compile(r"^\$ (penstock .*)\n((?:(?!\$ ).*\n)*)", re.M)


def masked(line: str) -> str:
    """A line without its numbers, which differ between machines; a line of the page may end in ``...``."""
    return re.sub(r"\d[\d.,]*(e-\d+)?", "#", line.strip())


@pytest.mark.slow
def test_every_command_of_the_page_prints_what_it_says(tmp_path: Path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    commands = [
        match
        for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.S | re.M)
        for match in COMMAND.findall(block)
    ]
    assert len(commands) == 5
    for command, printed in commands:
        ran = python(["-m", *shlex.split(command)], tmp_path, seconds=600, merged=True)
        rest = [masked(line) for line in ran.stdout.splitlines()]
        for line in filter(None, map(masked, printed.splitlines())):
            if line == "...":
                continue
            start = line.removesuffix("...")
            at = next(
                (
                    n
                    for n, each in enumerate(rest)
                    if each == line or (start != line and each.startswith(start))
                ),
                None,
            )
            assert at is not None, f"{command} did not print {line!r}, but:\n{ran.stdout}"
            rest = rest[at + 1 :]


def test_the_tables_of_the_page_are_a_config():
    (block,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.S | re.M)
    assert from_mapping(tomllib.loads(block)).optim.arguments == {"momentum": 0.9, "nesterov": True}
