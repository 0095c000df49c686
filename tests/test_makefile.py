"""Each target installs what it needs and no more, in any order: `make demo`, `make test`, `make docs`, `make test-slow`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
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


@pytest.mark.parametrize(
    ("target", "extras", "last"),
    [
        ("demo", "report", "penstock train"),
        ("test", "dev", "exit $((tests | types))"),
        ("docs", "docs", "docs/_build/html"),
        ("test-slow", "dev,docs,ci", '-m "slow and not exhaustive"'),
        ("test-all", "dev,docs,ci", "-m exhaustive"),
        ("coverage", "dev,docs,ci", "exit $((tests | report))"),
    ],
)
def test_a_target_installs_its_extras_alone(clone: Path, target: str, extras: str, last: str):
    printed = commands(clone, target)
    assert re.findall(r"-e '\.\[(.*)\]'", printed) == [extras]
    assert printed.rstrip().endswith(last)


@pytest.mark.parametrize(
    ("first", "installed", "missing"),
    [
        ("demo", ["demo"], ["test", "docs", "test-slow"]),
        ("test", ["demo", "setup", "test", "lint"], ["docs", "test-slow"]),
        ("test-slow", ["demo", "test", "docs", "setup-ci", "coverage"], []),
    ],
)
def test_what_a_target_has_installed_is_not_installed_again(
    clone: Path, first: str, installed: list[str], missing: list[str]
):
    touch_stamps(clone, first)
    assert [target for target in (*installed, *missing) if "pip" in commands(clone, target)] == missing


@pytest.mark.parametrize("fails", ["ruff", "mypy", "python", ""])
def test_the_tests_fail_with_the_lint_the_types_or_a_test(clone: Path, fails: str):
    touch_stamps(clone, "test")
    for name in ("ruff", "mypy", "python"):
        command = clone / ".venv" / "bin" / name
        command.write_text(f"#!/bin/sh\necho {name} $*\nexit {int(name == fails)}\n")
        command.chmod(0o755)
    words = ["make", "--no-print-directory", "test"]
    done = subprocess.run(words, cwd=clone, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == bool(fails)
    if fails != "ruff":
        assert re.search(r"^python -m pytest .*-m not slow\nmypy$", done.stdout, re.M)


@pytest.mark.parametrize("fails", ["run", "combine", "report", ""])
def test_what_was_covered_is_reported_though_a_test_fails(clone: Path, fails: str):
    touch_stamps(clone, "coverage")
    command = clone / ".venv" / "bin" / "python"
    command.write_text(f'#!/bin/sh\necho $*\ntest "$3" != "{fails}"\n')
    command.chmod(0o755)
    words = ["make", "--no-print-directory", "coverage"]
    done = subprocess.run(words, cwd=clone, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == bool(fails)
    assert ("-m coverage report" in done.stdout) == (fails != "combine")


def test_a_changed_constraint_installs_again(clone: Path):
    touch_stamps(clone, "test-slow")
    later = time.time() + 60
    os.utime(clone / "constraints.txt", (later, later))
    assert all("pip" in commands(clone, target) for target in ("demo", "test", "docs", "test-slow"))
