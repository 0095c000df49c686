"""Folders that survive: everything in them is on the disk before they get their name."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

UNFINISHED = ".unfinished"


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file and see it on the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """See a folder's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(path: Path) -> Path:
    """The name that a folder has until it is complete, and again before it goes."""
    return path.with_name(f".{path.name}{UNFINISHED}")


def begin(path: Path) -> Path:
    """Make the folder in which `path` will be written, and see that what earlier saves left unfinished is gone.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".*{UNFINISHED}"):
        discard(left)
    place = unfinished(path)
    place.mkdir()
    return place


def commit(path: Path) -> None:
    """Give a folder whose files are all on the disk its name; one that has the name already goes.

    Raises:
        OSError: the disk did not take it.
    """
    place = unfinished(path)
    sync_folder(place)
    if os.path.lexists(path):  # a link to nothing is in the way, too
        before = path.with_name(f".{path.name}.before{UNFINISHED}")
        path.rename(before)
        place.rename(path)
        discard(before)
    else:
        place.rename(path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Delete a folder; half deleted, it no longer has its name.

    Raises:
        OSError: it cannot be.
    """
    place = unfinished(path)
    path.rename(place)
    discard(place)


def discard(path: Path) -> None:
    """Delete a folder, a file or a link; of a link only itself, whatever it points to.

    Raises:
        OSError: it cannot be.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
