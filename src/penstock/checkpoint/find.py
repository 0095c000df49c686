"""Which checkpoints a folder holds, and which of them are sound."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from penstock.bounded_io import MEGABYTE, read_bytes, require_regular
from penstock.checkpoint.format.files import digest_of
from penstock.checkpoint.format.manifest import MANIFEST, Manifest, StoredTensor, parse
from penstock.errors import ConfigError, DataError
from penstock.tensor_file import TensorEntry, TensorFile

FOLDER = "checkpoints"
"""Within a run's folder."""

_MOST = 512 * MEGABYTE  # of a manifest
_NAME = re.compile(r"step-(\d{8,12})")


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of all that have a checkpoint's name, the newest first; whether they are sound is another question."""
    try:
        names = [(found, path) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}") from error
    return sorted(((int(found[1]), path) for found, path in names), reverse=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    found = _NAME.fullmatch(path.name)
    assert found is not None, "it is called as a checkpoint"
    return int(found[1])


def is_checkpoint(path: Path) -> bool:
    """Whether a path has a checkpoint's name."""
    return _NAME.fullmatch(path.name) is not None


def folder_of(run: Path) -> Path:
    """The folder of the checkpoints of a run, given as the run's folder or itself.

    Raises:
        ConfigError: it is neither.
    """
    if os.path.isdir(run / FOLDER):
        return run / FOLDER
    if os.path.isdir(run) and steps_in(run):
        return run
    raise ConfigError(f"{run} holds no checkpoints: it has no folder {FOLDER!r}, and no folder step-NUMBER")


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        DataError: it is missing or damaged.
    """
    where = path / MANIFEST
    try:
        data = read_bytes(where, _MOST)
    except OSError as error:
        raise DataError(f"cannot read {where}: {error.strerror}") from error
    manifest = parse(data, where)
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise DataError(f"{where} is of step {manifest.step}; its folder has another's name")
    return manifest


def missing(path: Path, manifest: Manifest, files: Iterable[str] | None = None) -> list[str]:
    """Files that are not there or have another size: what is wrong with each; quick, and blind to changed bytes."""
    found = []
    for name in manifest.files if files is None else files:
        try:
            require_regular(path / name)
            size = (path / name).stat().st_size
        except OSError as error:
            found.append(f"{path / name}: {error.strerror}")
            continue
        if size != manifest.files[name].bytes:
            found.append(f"{path / name} has {size:,} bytes, not {manifest.files[name].bytes:,}")
    return found


def damage(path: Path, manifest: Manifest, files: Iterable[str] | None = None) -> list[str]:
    """What is wrong with the files of a checkpoint, each read whole; nothing, if it is sound.

    Args:
        path: of the checkpoint.
        manifest: its own.
        files: those to look at; by default all.
    """
    found = []
    for name in manifest.files if files is None else files:
        wrong = missing(path, manifest, [name])
        if not wrong:
            try:
                if digest_of(path / name) != manifest.files[name].sha256:
                    wrong = [f"{path / name} is damaged: its SHA-256 digest is not the manifest's"]
                else:
                    wrong = _differences(path, manifest, name)
            except OSError as error:
                wrong = [f"{path / name}: {error.strerror}"]
        found += wrong
    return found


def _differences(path: Path, manifest: Manifest, file: str) -> list[str]:
    """Where the header of a file and the manifest, each sound by itself, say different things of its tensors."""
    said = {name: tensor for name, tensor in manifest.tensors.items() if tensor.file == file}
    with TensorFile(path / file) as found:
        entries = found.entries
    wrong = [differs(name, said.get(name), entries.get(name)) for name in dict.fromkeys((*said, *entries))]
    return [f"{path / file}: {one}" for one in wrong if one]


def differs(name: str, said: StoredTensor | None, found: TensorEntry | None) -> str:
    """How a tensor in a file differs from what the manifest says of it; empty if it does not."""
    if found is None:
        return f"it has no tensor {name!r:.200}, which the manifest says it has"
    if said is None:
        return f"it has a tensor {name!r:.200}, which the manifest does not know"
    if (said.shape, said.dtype) == (found.shape, found.dtype):
        return ""
    there, wanted = (f"{one.dtype} of shape {list(one.shape)}" for one in (found, said))
    return f"{name!r:.200} is {there}, and the manifest says {wanted}"


def is_whole(path: Path) -> bool:
    """Whether a checkpoint has a sound manifest and all its files, by their sizes."""
    try:
        return not missing(path, read_manifest(path))
    except DataError:
        return False
