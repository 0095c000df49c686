"""CONTRIBUTING's *How a step runs* names the files that a step enters, and its map the rooms that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.slow
def test_the_text_names_the_files_of_a_step():
    words = [sys.executable, "-m", "tools.walk"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    entered = {line.split()[0] for line in done.stdout.splitlines() if line.split()[0].endswith(".py")}
    text = PAGE.split("## How a step runs")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\S+\.py)`", text))
    assert entered <= named
    assert all((ROOT / "src" / "penstock" / path).exists() for path in named)


def test_the_map_has_every_room_and_the_page_at_most_1500_words():
    source = ROOT / "src" / "penstock"
    rooms = {path.name for path in source.iterdir() if (path / "__init__.py").exists()}
    of_the_map = PAGE.split("## Map of the code")[1].split("\n## ")[0]
    assert set(re.findall(r"^    (\w+)/ ", of_the_map, re.M)) == rooms
    assert len(PAGE.split()) <= 1500
