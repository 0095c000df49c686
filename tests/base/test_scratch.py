"""Temporary folders: deleted at the end, after a SIGKILL by the next process, and never another's."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.base.scratch import PREFIX, Scratch, remove_abandoned
from penstock.runtime.health.peers import PeerRegistry, supported
from penstock.runtime.transport.shared_memory import WakePipe

HOLD = """
import sys
from penstock.base.scratch import Scratch
scratch = Scratch()
(scratch.path / "store").write_text("x")
print(scratch.path, flush=True)
sys.stdin.read()
"""

MANY = """
from penstock.base.scratch import Scratch
for n in range(150):
    with Scratch() as scratch:
        (scratch.path / "store").write_text(str(n))
        assert (scratch.path / "store").read_text() == str(n)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for temporary files, here and in child processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def holder() -> tuple[subprocess.Popen[str], Path]:
    """Start a process with its own folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_it_is_deleted_at_the_end_and_with_the_last_reference(place: Path):
    with Scratch() as scratch:
        (scratch.path / "inner").mkdir()
        assert scratch.path.stat().st_mode & 0o777 == 0o700
    assert list(place.iterdir()) == []
    scratch = Scratch()
    del scratch
    gc.collect()
    assert list(place.iterdir()) == []


def test_folders_of_killed_processes_are_deleted_and_those_of_living_ones_stay(place: Path):
    killed, left = holder()
    living, kept = holder()
    assert sorted(place.iterdir()) == sorted([left, kept])
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert left.exists()
    remove_abandoned()
    assert list(place.iterdir()) == [kept]
    assert (kept / "store").read_text() == "x"
    living.communicate()
    assert list(place.iterdir()) == []


def test_links_files_and_other_users_folders_stay(place: Path):
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (place / f"{PREFIX}link").symlink_to(elsewhere)
    (place / f"{PREFIX}file").touch()
    (place / "penstock-other").mkdir()
    if os.geteuid() == 0:
        (place / f"{PREFIX}theirs").mkdir()
        os.chown(place / f"{PREFIX}theirs", 12345, 12345)
    abandoned = place / f"{PREFIX}abandoned"
    abandoned.mkdir()
    (abandoned / "link").symlink_to(elsewhere)
    before = sorted(place.rglob("*"))
    remove_abandoned()
    assert sorted(place.rglob("*")) == [path for path in before if abandoned not in (path, path.parent)]


@pytest.mark.slow
def test_processes_that_start_at_once_leave_each_others_alone(place: Path):
    started = [subprocess.Popen([sys.executable, "-c", MANY]) for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert list(place.iterdir()) == []


@pytest.mark.skipif(not supported(), reason="no shared memory of this kind here")
def test_a_wake_pipe_needs_no_file_and_may_wake_a_process_that_is_gone(place: Path):
    one, other = WakePipe(PeerRegistry()), WakePipe(PeerRegistry())
    one.connect(other.host)
    for _ in range(70_000):  # more than a pipe holds
        one.wake(other.host)
    assert os.read(other.host.pipe, 3) == b"111"
    assert list(place.iterdir()) == []
    other.close()
    for _ in range(70_000):
        one.wake(other.host)
    one.close()
    one.close()


@pytest.mark.skipif(not supported(), reason="no shared memory of this kind here")
def test_a_file_that_is_not_a_pipe_is_not_written_to(tmp_path: Path):
    wake_pipe = WakePipe(PeerRegistry())
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="not a pipe"):
        wake_pipe.connect(wake_pipe.host._replace(pipe=file))
    wake_pipe.close()
    os.close(file)
    assert (tmp_path / "file").read_bytes() == b""
