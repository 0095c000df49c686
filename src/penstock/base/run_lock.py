"""Lock of a run's folder, so that only one run uses it at a time.

The lock is ``flock(2)`` on a file in the folder. The kernel releases it when its holder dies, so a restart never meets a
stale lock. It works between hosts if the shared file system has such locks: NFS and GPFS do, Lustre with ``-o flock``.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.base.bounded_io import is_at
from penstock.base.errors import ConfigError

LOCK = "run.lock"
"""Name of the lock file: in a run's folder during the run, and in its checkpoints' folder while one is written."""

_POLL_INTERVAL = 0.1  # seconds
_MAX_BYTES = 400  # of the file, which names the holder


@contextmanager
def locked(folder: Path, *, wait: float = 0.0, say: Callable[[str], None]) -> Iterator[None]:
    """Lock a folder. A missing folder is created, and removed at the end if it is empty.

    After a restart, the previous process may take a while to die: `wait` is in seconds. `say` receives a message when
    the wait begins, or when the file system has no locks.
    """
    created = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        file = _take(folder, wait, say)
    except OSError as error:
        _remove_empty(created)
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            # Before the lock is released: afterwards the file could be the next holder's.
            (folder / LOCK).unlink()
        os.close(file)
        _remove_empty(created)


def may_be_restart() -> bool:
    """Return whether earlier processes of the same run may still be ending: torchrun restarts, Slurm requeues."""
    counts = ("TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT")
    return any(os.environ.get(name, "0") != "0" for name in counts)


def _take(folder: Path, wait: float, say: Callable[[str], None]) -> int:
    path, deadline, announced = folder / LOCK, time.monotonic() + wait, False
    while True:
        # In every round: a holder that ends removes the folder if it is empty.
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
            os.close(file)  # deleted by the previous holder
            continue
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"the folder {folder} is in use by {holder}; wait until that run has ended, stop it, or use another folder "
                "(train.name)"
            )
        if not announced:
            say(f"the folder {folder} is in use by {holder}; waiting up to {wait:g} s for it to end")
            announced = True
        time.sleep(_POLL_INTERVAL)


def _write_holder(file: int) -> None:
    with suppress(OSError):  # a full disk; the lock works without the text
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on host {socket.gethostname()}".encode(), 0)


def _read_holder(file: int) -> str:
    text = os.pread(file, _MAX_BYTES, 0).decode("utf-8", "replace")
    return text if text and text.isprintable() else "another process"


def _remove_empty(folders: Iterable[Path]) -> None:
    with suppress(OSError):  # the first folder that is not empty ends the loop
        for folder in folders:
            folder.rmdir()
