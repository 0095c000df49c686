"""Files written as a whole: a reader finds the old file or the new one, never a part of either.

New files are made by ordinary opens, so their mode follows the umask.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".unfinished"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors of writing, which name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path in the folder of `path` for a new file, which takes the place of `path` when the block ends.

    If the block raises, the new file is deleted and `path` is unchanged. Only one process at a time may replace a file.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.unlink(missing_ok=True)  # of a process that was killed
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def open_replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces `path` when the block ends, as `replacing` does.

    A link is followed. A device or a pipe is written to, not replaced.
    """
    path = Path(path)
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        with path.open("wb") as file, _naming(path):
            yield file
    else:
        with _naming(path), replacing(path) as unfinished, unfinished.open("wb") as file:
            yield file


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file as `open_replacing` does."""
    with open_replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8 as `open_replacing` does."""
    write_bytes(path, text.encode())


@contextmanager
def open_synced(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing, and flush it to the disk when the block ends."""
    with _naming(path), path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
