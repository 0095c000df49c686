"""Folders that appear as a whole: all their files are on the disk before the folder gets its name."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from penstock.base.atomic import UNFINISHED, sync_folder


def unfinished(path: Path) -> Path:
    """Return the name of a folder until it is complete, and again while it is being deleted."""
    return path.with_name(f".{path.name}{UNFINISHED}")


def begin(path: Path) -> Path:
    """Make the folder in which `path` will be written, and delete those that earlier saves left unfinished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in path.parent.glob(f".*{UNFINISHED}"):
        discard(abandoned)
    folder = unfinished(path)
    folder.mkdir()
    return folder


def commit(path: Path) -> None:
    """Give an unfinished folder, whose files are all on the disk, its name; replace one that has the name already."""
    folder = unfinished(path)
    # In this order: a name that is on the disk before the entries of its folder would be a checkpoint without files.
    sync_folder(folder)
    if os.path.lexists(path):  # also a link to nothing
        before = path.with_name(f".{path.name}.before{UNFINISHED}")
        # A folder with files cannot be replaced by a rename. Neither name is deleted before the new folder has its own.
        path.rename(before)
        folder.rename(path)
        discard(before)
    else:
        folder.rename(path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Delete a folder; a half-deleted one no longer has its name."""
    folder = unfinished(path)
    path.rename(folder)
    discard(folder)


def discard(path: Path) -> None:
    """Delete a folder, a file or a link; of a link only the link itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def digest_of(path: Path) -> str:
    """Return the SHA-256 digest of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
