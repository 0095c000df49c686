"""Files that others made, read within bounds: no pipe that makes a reader wait, no device that never ends, no bomb.

Everything here raises what the operating system would, so that a reader has one kind of error to put into words.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from tokenize import TokenError
from typing import Any

MEGABYTE = 1 << 20

DAMAGED_ARRAY = (
    ValueError, EOFError, TypeError, KeyError, OverflowError, MemoryError, SyntaxError, RecursionError, TokenError,
)  # fmt: skip
"""What numpy raises at a file of arrays that is none, or whose header says what cannot be."""


def require_regular(path: str | Path) -> None:
    """Refuse anything but a file that ends: a pipe would make its reader wait, a device might never end.

    Raises:
        OSError: it is not there, or something else than a file.
    """
    _require_file(os.stat(path).st_mode, path)


def _require_file(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def open_regular(path: str | Path) -> int:
    """Open a file that ends for reading, and return its descriptor; never waits for the other end of a pipe.

    Raises:
        OSError: it cannot be opened, or is something else than a file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_file(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, with one kind of error for whatever is wrong with it.

    Raises:
        ValueError: it is no JSON, or lists and objects are nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its lists and objects are nested too deeply") from error


def is_at(path: str | Path, descriptor: int) -> bool:
    """Whether an open file or folder is the one that a path names now; a link names itself."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def read_bytes(path: str | Path, most: int, *, pipes: bool = False) -> bytes:
    """A whole file.

    Args:
        path: of the file.
        most: bytes; a file that has more is refused.
        pipes: whether it may be a pipe, such as the output of another command.

    Raises:
        OSError: it cannot be read, is larger, or is no file.
    """
    if not pipes:
        require_regular(path)
    found = bytearray()
    with open(path, "rb") as file:
        fits = os.fstat(file.fileno()).st_size <= most
        while fits and (part := file.read(MEGABYTE)):
            found += part
            fits = len(found) <= most
    if not fits:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return bytes(found)
