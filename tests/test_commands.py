"""A command that hangs fails its test, with the stacks of all its processes, and none of them is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import finish, python, start
from tests.support.waiting import until

pytestmark = pytest.mark.slow

PARENT = """
import subprocess, sys
code = "import time\\ndef sleeps_in_the_child(): open('asleep', 'w'); time.sleep(600)\\nsleeps_in_the_child()"
child = subprocess.Popen([sys.executable, "-c", code])
print(child.pid, flush=True)
def waits_in_the_parent(): child.wait()
waits_in_the_parent()
"""


def ended(pid: int) -> bool:
    """Return whether a process is gone, or waits for its parent to see that it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_command_that_hangs_shows_what_all_its_processes_do_and_leaves_none(tmp_path: Path):
    process = start([sys.executable, "-c", PARENT], tmp_path, os.environ)
    until(lambda: (tmp_path / "asleep").exists())
    with pytest.raises(AssertionError, match=r"did not end within 0.5 s") as caught:
        finish(process, 0.5)
    shown = str(caught.value)
    assert "waits_in_the_parent" in shown
    assert "sleeps_in_the_child" in shown
    child = next(int(line) for line in shown.splitlines() if line.isdecimal())
    until(lambda: ended(child))


def test_a_command_that_ends_gives_its_output(tmp_path: Path):
    process = start([sys.executable, "-c", "import os; print(os.getcwd())"], tmp_path, os.environ)
    assert finish(process, 60.0) == f"{tmp_path}\n"
    assert process.returncode == 0


SCRIPT = """
import atexit, os, sys
import shown
atexit.register(print, "at exit")
print(os.getcwd(), sys.argv, __name__, shown.FROM, os.environ["TOLD"])
print("a complaint", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def test_a_forked_command_is_as_one_that_was_started(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "shown.py").write_text("FROM = 'beside it'")
    environment = {**os.environ, "TOLD": "by its environment"}
    for words in (["script.py", "3"], ["-m", "script", "4"]):
        forked = python(words, tmp_path, environment)
        started = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert (forked.returncode, forked.stderr) == (started.returncode, started.stderr)
        assert forked.stdout == started.stdout
    merged = python(["script.py", "0"], tmp_path, environment, merged=True)
    assert sorted(merged.stdout.splitlines()[1:]) == ["a complaint", "at exit"]


def test_a_forked_command_that_hangs_fails_with_its_stack_and_leaves_no_process(tmp_path: Path):
    (tmp_path / "parent.py").write_text(PARENT)
    with pytest.raises(AssertionError, match=r"did not end within 10 s") as caught:
        python(["parent.py"], tmp_path, seconds=10.0)
    shown = str(caught.value)
    assert "waits_in_the_parent" in shown
    child = next(int(line) for line in shown.splitlines() if line.isdecimal())
    until(lambda: ended(child))
