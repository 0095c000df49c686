"""Files that are replaced as a whole: whoever reads one finds the old or the new, never a part.

They are made by ordinary opens, so their mode is what the umask says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".unfinished"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` for the body to write a new file under; it then takes the place of `path`.

    If the body raises, the new file is deleted and `path` is as it was. One process at a time may replace a file.

    Raises:
        OSError: the file cannot take its place, or something that cannot be deleted is in the way.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.unlink(missing_ok=True)  # of a process that was killed
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file as `replacing` does. A link is followed; a device or a pipe is written to and stays what it is.

    Raises:
        OSError: the disk did not take it; an earlier file is as it was.
    """
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        with path.open("wb") as there:
            there.write(data)
        return
    with replacing(path) as unfinished:
        unfinished.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a text file, in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())
