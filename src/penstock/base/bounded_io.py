"""Bounded reads of a user's files: no pipe that blocks its reader, no device that never ends, no oversized file.

All errors are of the operating system's kind, so a caller has one kind of error to report.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any

MEGABYTE = 1 << 20

_UNREADABLE = (EOFError, MemoryError, SyntaxError, RecursionError, TokenError)
DAMAGED_ARRAY = (*_UNREADABLE, ValueError, TypeError, KeyError, OverflowError)
"""Errors that numpy raises at a file that has no arrays, or whose header is impossible."""


def require_regular(path: str | Path) -> None:
    """Require a regular file: a pipe would block its reader, a device might never end."""
    with _system_errors(path):
        _require_file(os.stat(path).st_mode, path)


@contextmanager
def _system_errors(path: str | Path) -> Iterator[None]:
    """Make an `OSError` of Python's own refusal of a path, such as one with a NUL character."""
    try:
        yield
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from error


def _require_file(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def open_regular(path: str | Path) -> int:
    """Open a regular file for reading without waiting for the other end of a pipe, and return its descriptor."""
    with _system_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_file(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class LongNumberError(ValueError):
    """JSON has a whole number of more digits than Python reads."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; everything that can be wrong with it is a `ValueError`, even deep nesting."""
    try:
        try:
            return json.loads(text)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError as error:
            raise LongNumberError(_long_number(text)) from error
    except RecursionError as error:
        raise ValueError("its lists and objects are nested too deeply") from error


def _long_number(text: str | bytes) -> str:
    limit = sys.get_int_max_str_digits()
    long = object()
    value = json.loads(text, parse_int=lambda digits: long if len(digits.lstrip("-")) > limit else 0)
    fields = value.items() if isinstance(value, dict) else ()
    name = next((repr(name) for name, inner in fields if _contains(inner, long)), "it")
    return f"{name} has a whole number of more than {limit:,} digits; write it in quotes, as text, or leave it out"


def _contains(value: object, member: object) -> bool:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if one is member:
            return True
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return False


def is_at(path: str | Path, descriptor: int) -> bool:
    """Return whether an open file or folder still has this path; a link is not followed."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def read_bytes(path: str | Path, max_bytes: int, *, pipes: bool = False) -> bytes:
    """Read a file, or a pipe if pipes are allowed; a larger or an irregular file is an `OSError`."""
    if not pipes:
        require_regular(path)
    data = bytearray()
    with _system_errors(path), open(path, "rb") as file:
        fits = os.fstat(file.fileno()).st_size <= max_bytes
        while fits and (chunk := file.read(MEGABYTE)):
            data += chunk
            fits = len(data) <= max_bytes
    if not fits:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return bytes(data)
