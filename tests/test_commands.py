"""A command that hangs fails its test, with the stacks of all its processes, and none of them is left."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import finish, start

PARENT = """
import subprocess, sys
code = "import time\\ndef sleeps_in_the_child(): time.sleep(600)\\nsleeps_in_the_child()"
child = subprocess.Popen([sys.executable, "-c", code])
print(child.pid, flush=True)
def waits_in_the_parent(): child.wait()
waits_in_the_parent()
"""


def test_a_command_that_hangs_shows_what_all_its_processes_do_and_leaves_none(tmp_path: Path):
    process = start([sys.executable, "-c", PARENT], tmp_path, os.environ)
    with pytest.raises(AssertionError, match=r"did not end within 2 s") as caught:
        finish(process, 2.0)
    shown = str(caught.value)
    assert "waits_in_the_parent" in shown
    assert "sleeps_in_the_child" in shown
    child = next(int(line) for line in shown.splitlines() if line.isdecimal())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text()


def test_a_command_that_ends_gives_its_output(tmp_path: Path):
    process = start([sys.executable, "-c", "import os; print(os.getcwd())"], tmp_path, os.environ)
    assert finish(process, 60.0) == f"{tmp_path}\n"
    assert process.returncode == 0
