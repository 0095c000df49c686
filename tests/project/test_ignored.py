"""What commands leave in the folder of the repository is ignored by git, and what belongs to it is not."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.github import ROOT

MADE = [
    ".venv/x",
    ".venv-oldest/x",
    "dist/x.whl",
    "build/x",
    "runs/a/run.json",
    "src/penstock.egg-info/x",
    ".coverage",
]


def test_what_commands_make_is_ignored():
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    checked = subprocess.run(
        ["git", "check-ignore", "--no-index", *MADE, "tools/release_check.py", ".github/workflows/tests.yml"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert checked.stdout.split() == MADE
