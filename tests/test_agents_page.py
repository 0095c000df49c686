"""AGENTS.md fits on a page, its example trains, and its commands, targets and files exist."""

from __future__ import annotations

import re

import pytest

from tests.support.documentation import ROOT, blocks
from tests.support.page import require_options

PAGE = ROOT / "AGENTS.md"
TEXT = PAGE.read_text()


def test_the_smallest_example_trains(capsys: pytest.CaptureFixture[str]):
    (program,) = (block.text for block in blocks(PAGE) if block.kind == "python")
    names: dict = {}
    exec(compile(program, "AGENTS.md", "exec"), names)
    assert capsys.readouterr().out.startswith("tensor(")
    assert list(names["weights"]) == list(names["model"].state_dict())


def test_it_is_a_page_and_what_it_names_exists():
    assert len(TEXT.split()) <= 750
    commands = [command for block in blocks(PAGE) for command in block.commands]
    ours = [command.split()[1:] for command in commands if command.startswith("penstock ")]
    assert len(ours) == 5
    for words in ours:
        require_options(words)
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"\bmake ([a-z-]+)", TEXT))
    assert {"test", "test-slow"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []
    named = set(re.findall(r"`((?:src|tests|docs)/[\w./]+)`", TEXT))
    assert len(named) >= 5
    assert [path for path in named if not (ROOT / path).exists()] == []
