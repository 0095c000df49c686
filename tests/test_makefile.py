"""`make demo` installs what a user needs, `make test` the rest, in either order."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def commands(clone: Path, target: str) -> str:
    """Return what `make` would run."""
    words = ["make", "--dry-run", "--no-print-directory", target]
    return subprocess.run(words, cwd=clone, check=True, capture_output=True, text=True, timeout=60).stdout


def touch_stamps(clone: Path, target: str) -> None:
    """Do what the target's commands do to the stamps of what is installed."""
    (clone / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    for line in commands(clone, target).splitlines():
        for stamp in line.split()[1:] if line.startswith("touch ") else []:
            (clone / stamp).touch()


def test_the_demo_installs_no_tools(clone: Path):
    printed = commands(clone, "demo")
    assert "-e '.[report]'" in printed
    assert ".[dev]" not in printed
    assert printed.rstrip().endswith("penstock train")


def test_after_the_demo_the_tests_install_the_tools(clone: Path):
    touch_stamps(clone, "demo")
    assert "pip" not in commands(clone, "demo")
    assert "-e '.[dev]'" in commands(clone, "test")


def test_after_the_tests_the_demo_installs_nothing(clone: Path):
    touch_stamps(clone, "test")
    for target in ("demo", "test", "test-slow"):
        assert "pip" not in commands(clone, target)
