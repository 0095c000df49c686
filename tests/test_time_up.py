"""Slow tests that are left when the time for them is up are not begun, and named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import TIME_UP, UNTIL

ROOT = Path(__file__).parents[1]
SLOW = "tests/bench/test_commands.py::test_every_command_that_is_named_is_run"


@pytest.mark.parametrize("left", [-1.0, 600.0])
def test_a_slow_test_begins_only_while_there_is_time(left: float):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", SLOW],
        cwd=ROOT, env={**os.environ, UNTIL: str(time.time() + left)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert (f"NOT BEGUN {SLOW}" in done.stdout) is (left < 0)
    assert (TIME_UP in done.stdout) is (left < 0)
