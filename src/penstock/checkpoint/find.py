"""Search of a folder for checkpoints, and checks of their files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from penstock.base.bounded_io import MEGABYTE, read_bytes, require_regular
from penstock.base.errors import ConfigError, DataError, os_errors_as
from penstock.base.tensor_file import TensorEntry, TensorFile
from penstock.checkpoint.manifest import MANIFEST, Manifest, StoredTensor, parse
from penstock.checkpoint.whole_folder import digest_of

FOLDER = "checkpoints"
"""Name of the checkpoints' folder in a run's folder."""

_MAX_MANIFEST = 512 * MEGABYTE  # it is read as a whole before its digest can be compared
# Padded to 8 digits, so that names sort as steps do; a longer run has more digits.
_NAME = re.compile(r"step-(\d{8,12})")


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of everything with a checkpoint's name, newest first; its content is not checked."""
    try:
        matches = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}") from error
    return sorted(((int(match[1]), path) for match, path in matches), reverse=True)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, "it has a checkpoint's name"
    return int(match[1])


def is_checkpoint(path: Path) -> bool:
    """Return whether a path has a checkpoint's name."""
    return _NAME.fullmatch(path.name) is not None


def folder_of(run: Path) -> Path:
    """Return the folder of a run's checkpoints, given that folder or the run's."""
    if os.path.isdir(run / FOLDER):
        return run / FOLDER
    if os.path.isdir(run) and steps_in(run):
        return run
    raise ConfigError(f"{run} holds no checkpoints: it has no folder {FOLDER!r}, and no folder step-NUMBER")


def read_manifest(path: Path) -> Manifest:
    where = path / MANIFEST
    if (path / FOLDER).is_dir():
        newest = next(
            (str(checkpoint) for _, checkpoint in steps_in(path / FOLDER)), "RUN/checkpoints/step-N"
        )
        raise DataError(f"{path} is a run; give one of its checkpoints, such as {newest}")
    with os_errors_as(DataError, f"cannot read {where}"):
        data = read_bytes(where, _MAX_MANIFEST)
    manifest = parse(data, where)
    if is_checkpoint(path) and step_of(path) != manifest.step:
        raise DataError(f"{where} is of step {manifest.step}; its folder has another's name")
    return manifest


def missing(path: Path, manifest: Manifest, files: Iterable[str] | None = None) -> list[str]:
    """Return a message for each file that is missing or has another size; quick, as no file is read."""
    problems = []
    for name in manifest.files if files is None else files:
        try:
            require_regular(path / name)
            size = (path / name).stat().st_size
        except OSError as error:
            problems.append(f"{path / name}: {error.strerror}")
            continue
        if size != manifest.files[name].bytes:
            problems.append(f"{path / name} has {size:,} bytes, not {manifest.files[name].bytes:,}")
    return problems


def damage(path: Path, manifest: Manifest, files: Iterable[str] | None = None) -> list[str]:
    """Read the files of a checkpoint, and return a message for each that is missing or damaged."""
    problems = []
    for name in manifest.files if files is None else files:
        wrong = missing(path, manifest, [name])
        try:
            if not wrong and digest_of(path / name) != manifest.files[name].sha256:
                wrong = [f"{path / name} is damaged: its SHA-256 digest is not the manifest's"]
            problems += wrong or _differences(path, manifest, name)
        except OSError as error:
            problems.append(f"{path / name}: {error.strerror}")
    return problems


def _differences(path: Path, manifest: Manifest, file: str) -> list[str]:
    """Return the contradictions between the header of a file and the manifest, each sound by itself."""
    listed = {name: tensor for name, tensor in manifest.tensors.items() if tensor.file == file}
    with TensorFile(path / file) as tensors:
        entries = tensors.entries
    wrong = [difference(n, listed.get(n), entries.get(n)) for n in dict.fromkeys((*listed, *entries))]
    return [f"{path / file}: {problem}" for problem in wrong if problem]


def difference(name: str, listed: StoredTensor | None, entry: TensorEntry | None) -> str:
    """Describe how a tensor's entry in a file differs from the manifest; empty if it does not."""
    if entry is None:
        return f"it has no tensor {name!r:.200}, which the manifest says it has"
    if listed is None:
        return f"it has a tensor {name!r:.200}, which the manifest does not know"
    if (listed.shape, listed.dtype) == (entry.shape, entry.dtype):
        return ""
    actual, expected = (f"{tensor.dtype} of shape {list(tensor.shape)}" for tensor in (entry, listed))
    return f"{name!r:.200} is {actual}, and the manifest says {expected}"


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint has a sound manifest, and all its files with the right sizes."""
    try:
        return not missing(path, read_manifest(path))
    except DataError:
        return False
