"""Folders for one process's temporary files, deleted when it ends or, if it was killed, by the next process that starts.

Each folder has a lock (``flock(2)``), which the kernel releases when its process dies, however that happens. A folder
without a lock is therefore abandoned. No process id is checked: another process or container may have it by now.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Self

from penstock.base.bounded_io import is_at

PREFIX = "penstock-scratch-"


class Scratch:
    """A new temporary folder for this user alone, in ``TMPDIR`` or ``/tmp``; a context manager.

    Creating one also deletes the folders that killed processes of this user have left.
    """

    def __init__(self) -> None:
        remove_abandoned()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = _open(self.path)
            if lock is not None:
                # Without locks in this file system, no other process can take the folder for abandoned.
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if is_at(self.path, lock):
                    break
                os.close(lock)  # deleted by another process before it was locked
        self._finalizer = weakref.finalize(self, _delete, self.path, lock, os.getpid())

    def close(self) -> None:
        """Delete the folder and its content; may be called twice. It is called when the object is garbage."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_abandoned() -> None:
    """Delete this user's folders that have no lock, as far as they can be deleted."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(path: Path) -> None:
    lock = _open(path)
    if lock is None:
        return
    try:
        # The lock keeps other processes out. An owner that has not locked its new folder yet notices, and makes another one.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(path, lock):
            shutil.rmtree(path, ignore_errors=True)  # follows no link
    except OSError:
        pass  # in use
    finally:
        os.close(lock)


def _open(path: Path) -> int | None:
    """Open a folder of this user; return None for a link, another kind of file, or one that is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode):
        return descriptor
    os.close(descriptor)
    return None


def _delete(path: Path, lock: int, owner: int) -> None:
    """Delete the folder; in a forked process only close the descriptor."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
