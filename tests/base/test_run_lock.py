from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.base.run_lock import LOCK, locked, may_be_restart


def test_the_error_names_the_holder(tmp_path: Path):
    who = f"process {os.getpid()} on host {socket.gethostname()}"
    with locked(tmp_path, say=pytest.fail):
        with pytest.raises(ConfigError, match=f"^the folder .* is in use by {who}; wait until"):
            locked(tmp_path, say=pytest.fail).__enter__()
        assert (tmp_path / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path, say=pytest.fail):
        pass


def test_a_lock_ends_with_its_process(tmp_path: Path):
    lines = [
        "import os, signal; from pathlib import Path; from penstock.base.run_lock import locked",
        f"lock = locked(Path({str(tmp_path)!r}), say=print)",
        "lock.__enter__()",
        "os.kill(os.getpid(), signal.SIGKILL)",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False)
    assert (tmp_path / LOCK).exists()
    with locked(tmp_path, say=pytest.fail):
        assert f"process {os.getpid()} " in (tmp_path / LOCK).read_text()


def test_a_restart_waits_for_the_process_before_it(tmp_path: Path):
    said: list[str] = []
    with ExitStack() as before:
        before.enter_context(locked(tmp_path, say=pytest.fail))

        def let_it_end(text: str) -> None:
            said.append(text)
            before.close()

        with locked(tmp_path, wait=60.0, say=let_it_end):
            assert (tmp_path / LOCK).exists()
    assert len(said) == 1
    assert f"is in use by process {os.getpid()} on host " in said[0]


def test_restarts_are_torchruns_and_slurms(monkeypatch: pytest.MonkeyPatch):
    for name in ("TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"):
        monkeypatch.setenv(name, "0")
        assert not may_be_restart()
        monkeypatch.setenv(name, "2")
        assert may_be_restart()
        monkeypatch.delenv(name)


def test_created_folders_are_removed_if_they_stay_empty(tmp_path: Path):
    with locked(tmp_path / "runs" / "a", say=pytest.fail):
        assert (tmp_path / "runs" / "a" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "runs" / "a", say=pytest.fail):
        (tmp_path / "runs" / "a" / "config.toml").touch()
    assert [path.name for path in (tmp_path / "runs" / "a").iterdir()] == ["config.toml"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot make the folder .*: Not a directory"):
        locked(tmp_path / "file" / "a", say=pytest.fail).__enter__()


def test_a_link_in_the_place_of_the_lock_is_refused(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        locked(tmp_path / "run", say=pytest.fail).__enter__()
    assert not (tmp_path / "elsewhere").exists()
