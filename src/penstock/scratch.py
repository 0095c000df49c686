"""Folders for one process's own files, which are deleted when it ends, and after it was killed by the next that starts.

A folder is held by a lock (``flock(2)``) on the folder itself, which the kernel drops when its process dies, however that
happens. So what nobody holds is of a process that is gone: no process id has to be looked up, which another process or
another container may have by now.
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
from types import TracebackType
from typing import Self

from penstock.bounded_io import is_at

PREFIX = "penstock-scratch-"


class Scratch:
    """A new folder in the place for temporary files (``TMPDIR``, or ``/tmp``), for this user alone; a context manager.

    Making one also deletes those that processes of this user have left which were killed.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        remove_abandoned()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = _open(self.path)
            if lock is not None:
                with suppress(
                    OSError
                ):  # a file system without such locks: nobody can take it for abandoned, either
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if is_at(self.path, lock):
                    break
                os.close(lock)  # it was taken for an abandoned one before it was locked
        self._end = weakref.finalize(self, _delete, self.path, lock, os.getpid())

    def close(self) -> None:
        """Delete the folder and all that is in it; may be called twice. Else that is done when nobody has it any more."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def remove_abandoned() -> None:
    """Delete the folders that no process holds any more, as far as they are this user's and can be deleted."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as found:
        for entry in found:
            if entry.name.startswith(PREFIX):
                _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(path: Path) -> None:
    lock = _open(path)
    if lock is None:
        return
    try:
        # Whoever else looks finds it locked now, and its maker, if it has not come to that yet, makes another one.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(path, lock):
            shutil.rmtree(path, ignore_errors=True)  # follows no link
    except OSError:
        pass  # somebody holds it
    finally:
        os.close(lock)


def _open(path: Path) -> int | None:
    """A descriptor of a folder of this user's own; None for a link, anything else, and what is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode):
        return descriptor
    os.close(descriptor)
    return None


def _delete(path: Path, lock: int, owner: int) -> None:
    """Of a process that was forked, only the descriptor goes."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
