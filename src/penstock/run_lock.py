"""One run at a time in a folder: a lock that ends with the process that holds it, however that process ends.

The lock is ``flock(2)`` on a file in the folder. The kernel drops it when its holder dies, so a restart never meets a stale
one. Between hosts it holds where the shared file system has such locks: NFS and GPFS do, Lustre does with ``-o flock``.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.bounded_io import is_at
from penstock.errors import ConfigError

LOCK = "run.lock"
"""Within a run's folder while the run goes on, and within that of its checkpoints while one is written."""

_POLL = 0.1
_MOST = 400  # bytes of the file, which says who holds it


@contextmanager
def locked(folder: Path, *, wait: float = 0.0, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a folder. A folder that is not there is made, and removed at the end if nothing else is in it.

    Args:
        folder: of a run, or of its checkpoints.
        wait: seconds that another holder is given to end. After a restart the process before may take a while to die.
        say: where it is told that it waits, or that the file system has no locks.

    Raises:
        ConfigError: another process holds it (the message names it), or the folder or file cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        file = _take(folder, wait, say)
    except OSError as error:
        _remove_empty(made)
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / LOCK).unlink()
        os.close(file)
        _remove_empty(made)


def may_be_restart() -> bool:
    """Whether processes of the same run, started before, may still be about to end: torchrun restarts, Slurm requeues."""
    counts = ("TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT")
    return any(os.environ.get(name, "0") != "0" for name in counts)


def _take(folder: Path, wait: float, say: Callable[[str], None]) -> int:
    """Open the lock file and lock it."""
    path, end, told = folder / LOCK, time.monotonic() + wait, False
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(file)
            os.close(file)
        except OSError as error:
            say(f"cannot lock {path}: {error.strerror}. Make sure that no other run uses this folder")
            return file
        else:
            if is_at(path, file):
                _write_holder(file)
                return file
            os.close(file)  # the holder before has deleted it
            continue
        if time.monotonic() >= end:
            raise ConfigError(
                f"the folder {folder} is in use by {holder}; wait until that run has ended, stop it, or use another folder "
                "(train.name)"
            )
        if not told:
            say(f"the folder {folder} is in use by {holder}; waiting up to {wait:g} s for it to end")
            told = True
        time.sleep(_POLL)


def _write_holder(file: int) -> None:
    with suppress(OSError):  # a full disk; the lock holds without it
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on host {socket.gethostname()}".encode(), 0)


def _read_holder(file: int) -> str:
    text = os.pread(file, _MOST, 0).decode("utf-8", "replace")
    return text if text and text.isprintable() else "another process"


def _remove_empty(folders: Iterable[Path]) -> None:
    with suppress(OSError):  # the first that is not empty ends it
        for folder in folders:
            folder.rmdir()
