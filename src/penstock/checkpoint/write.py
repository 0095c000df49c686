"""Writing of a snapshot as a checkpoint: each process writes its stages, then the leader writes the manifest."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.base.atomic import open_synced
from penstock.base.host import to_stderr
from penstock.base.run_lock import locked
from penstock.base.tensor_file import StoredFile, dtype_name, write_tensors
from penstock.base.version import __version__
from penstock.checkpoint import whole_folder
from penstock.checkpoint.find import is_whole, path_of, steps_in
from penstock.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    StoredTensor,
    digest_of_config,
    dump,
)
from penstock.checkpoint.snapshot import Snapshot, join_values
from penstock.checkpoint.together import Together


@dataclass(frozen=True)
class Facts:
    """Contents of a manifest that are the same at every step of a run."""

    stages: int
    seed: int
    layout: Mapping[str, Any]
    config: Mapping[str, Any]


def file_name(stage: int, stages: int) -> str:
    """Return the name of the file of a stage's tensors."""
    return f"stage-{stage + 1:05d}-of-{stages:05d}.safetensors"


def write_checkpoint(folder: Path, snapshot: Snapshot, facts: Facts, together: Together) -> Path:
    """Write the checkpoint of a step, or raise on every process if one cannot; every process calls this.

    Returns:
        Path of the checkpoint, which appears only when everything is on the disk.
    """
    path = path_of(folder, snapshot.step)
    with ExitStack() as held:
        together.each(lambda: _begin(path, held) if together.leads else None)
        try:
            parts = together.each(lambda: _write_part(whole_folder.unfinished(path), snapshot, facts.stages))
            together.each(lambda: _finish(path, snapshot.step, facts, parts) if together.leads else None)
        except BaseException:
            if together.leads:
                shutil.rmtree(whole_folder.unfinished(path), ignore_errors=True)  # the next save tries again
            raise
    return path


def _begin(path: Path, held: ExitStack) -> None:
    """Lock and make the unfinished folder; two runs that write at once would delete each other's."""
    held.enter_context(locked(path.parent, say=to_stderr))
    whole_folder.begin(path)


_Files = dict[str, StoredFile]
_Tensors = dict[str, StoredTensor]
_Part = tuple[_Files, _Tensors, dict[int, tuple[str, ...]], dict[str, Any]]
"""Files, tensors, layers by stage, and values that one process wrote."""


def write_stages(
    folder: Path, tensors: Iterable[tuple[int, dict[str, Tensor]]], stages: int
) -> tuple[_Files, _Tensors]:
    """Write a file for each stage, taken one after the other, and return the manifest's entries for files and tensors."""
    written: _Files = {}
    listed: _Tensors = {}
    for stage, by_name in tensors:
        file = file_name(stage, stages)
        written[file] = write_tensors(folder / file, by_name)
        for name, tensor in by_name.items():
            listed[name] = StoredTensor(file, tuple(tensor.shape), dtype_name(name, tensor))
    return written, listed


def _write_part(folder: Path, snapshot: Snapshot, stages: int) -> _Part:
    return *write_stages(folder, snapshot.tensors.items(), stages), snapshot.layers, snapshot.values


def _finish(path: Path, step: int, facts: Facts, parts: list[_Part]) -> None:
    layers = {s: names for _, _, by_stage, _ in parts for s, names in by_stage.items()}
    assert sorted(layers) == list(range(facts.stages)), "every stage is written by one process"
    config = dict(facts.config)
    manifest = Manifest(
        step=step,
        seed=facts.seed,
        layers=tuple(layers[s] for s in sorted(layers)),
        layout=dict(facts.layout),
        files={name: file for written, _, _, _ in parts for name, file in sorted(written.items())},
        tensors={name: tensor for _, listed, _, _ in parts for name, tensor in listed.items()},
        values=join_values([values for _, _, _, values in parts if values]),
        config=config,
        config_sha256=digest_of_config(config),
        versions=versions(),
    )
    finish(path, manifest)


def finish(path: Path, manifest: Manifest) -> None:
    """Write the manifest, and give the folder its name."""
    folder = whole_folder.unfinished(path)
    for name, file in manifest.files.items():
        if (folder / name).stat().st_size != file.bytes:
            raise OSError(0, "does not have the size that was written; is the folder shared?", folder / name)
    with open_synced(folder / MANIFEST) as stream:
        stream.write(dump(manifest))
    whole_folder.commit(path)


def versions() -> dict[str, str]:
    """Return the versions of Penstock, torch and Python."""
    return {
        "penstock": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def prune(folder: Path, keep_last: int, keep_every: int) -> list[Path]:
    """Delete old checkpoints.

    Incomplete ones are neither counted nor deleted.

    Args:
        keep_last: number of the newest complete checkpoints to keep; 0 keeps all.
        keep_every: interval in steps; checkpoints whose step is a multiple are kept, too; 0 for none.
    """
    if not keep_last:
        return []
    # Newest first, so the ones to keep come first.
    complete = [(step, path) for step, path in steps_in(folder) if is_whole(path)]
    old = [path for step, path in complete[keep_last:] if not (keep_every and step % keep_every == 0)]
    for path in old:
        whole_folder.remove(path)
    return old
