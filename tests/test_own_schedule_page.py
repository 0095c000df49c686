"""The page *Write your own schedule* runs as it is printed: files, code, commands and their output."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import group
from penstock.schedule.families import lookup
from tests.support.commands import python

PAGE = Path(__file__).parents[1] / "docs" / "own_schedule.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.S | re.M)


def assert_printed(printed: str, shown: str) -> None:
    """The output is the one on the page, in which ``...`` stands for any text."""
    pattern = r"\.\.\.".join(re.escape(part) for part in shown.strip("\n").split("..."))
    pattern = pattern.replace(r"\.\.\.", ".*")
    assert re.fullmatch(pattern, printed.strip("\n"), re.S), f"{printed}\n--- and on the page:\n{shown}"


class Reader:
    """A reader who does what the page says, in an empty folder."""

    def __init__(self, folder: Path, in_processes: bool) -> None:
        self.folder, self.in_processes = folder, in_processes
        self.names: dict[str, object] = {"__name__": "a_page"}
        self.printed = ""

    def python(self, code: str) -> None:
        if name := re.match(r"# (\w+\.py)\n", code):
            (self.folder / name[1]).write_text(code.removeprefix(name[0]))
            return
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, PAGE.name, "exec"), self.names)
        self.printed = output.getvalue()

    def text(self, text: str) -> None:
        first, *commands = re.split(r"^\$ ", text, flags=re.M)
        if first:
            assert_printed(self.printed, first)
        for command in commands:
            line, _, shown = command.partition("\n")
            words = shlex.split(line)
            assert_printed(self.run(words) if self.in_processes else self.call(words), shown)

    def call(self, words: list[str]) -> str:
        assert words[0] == "penstock"
        done = CliRunner().invoke(group, words[1:], catch_exceptions=False, env={"COLUMNS": "160"})
        assert done.exit_code == 0, done.output
        return done.stdout

    def run(self, words: list[str]) -> str:
        environment = {**os.environ, "COLUMNS": "160", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        assert words[0] == "penstock"
        done = python(["-m", *words], self.folder, environment)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(autouse=True)
def a_fresh_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(lookup, "_registered", {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("late", None)
    yield
    sys.modules.pop("late", None)


def test_the_page_runs_in_one_process(tmp_path: Path):
    reader = Reader(tmp_path, in_processes=False)
    for language, block in BLOCK.findall(PAGE.read_text()):
        if "penstock verify" not in block:
            getattr(reader, language)(block)


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(tmp_path: Path):
    reader = Reader(tmp_path, in_processes=True)
    for language, block in BLOCK.findall(PAGE.read_text()):
        getattr(reader, language)(block)
    drawn = (tmp_path / "late.svg").read_text()
    words = re.findall(r"<text [^>]*>([^<]*)</text>", drawn)
    in_docs = re.findall(
        r"<text [^>]*>([^<]*)</text>", (PAGE.parent / "schedules" / "late-weights.svg").read_text()
    )
    assert words == in_docs
    assert "Late weight gradients" in words
