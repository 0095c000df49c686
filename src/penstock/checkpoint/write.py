"""A snapshot becomes a checkpoint on disk: every process writes its stages, then the leader the manifest."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.atomic import open_synced
from penstock.checkpoint.find import is_whole, path_of, steps_in
from penstock.checkpoint.format import files
from penstock.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    StoredTensor,
    digest_of_config,
    dump,
)
from penstock.checkpoint.snapshot import Snapshot, join_values
from penstock.checkpoint.together import Together
from penstock.host import to_stderr
from penstock.run_lock import locked
from penstock.tensor_file import StoredFile, dtype_name, write_tensors


@dataclass(frozen=True)
class Facts:
    """What a manifest says of a run that does not change from step to step.

    Attributes:
        stages: of the model.
        seed: of the random numbers in layers.
        layout: how the run is spread.
        config: of the run, of plain values.
    """

    stages: int
    seed: int
    layout: Mapping[str, Any]
    config: Mapping[str, Any]


def file_name(stage: int, stages: int) -> str:
    """Of a stage's tensors."""
    return f"stage-{stage + 1:05d}-of-{stages:05d}.safetensors"


def write_checkpoint(folder: Path, snapshot: Snapshot, facts: Facts, together: Together) -> Path:
    """Write the checkpoint of a step; every process calls it.

    Returns:
        Its path: there once all of it is on the disk, and not before.

    Raises:
        PenstockError: on every process, if any could not write its part, or another run is writing in this folder. What was
            written goes, as far as it can be deleted, and earlier checkpoints are as they were.
    """
    path = path_of(folder, snapshot.step)
    with ExitStack() as held:
        together.each(lambda: _begin(path, held) if together.leads else None)
        try:
            parts = together.each(lambda: _write_part(files.unfinished(path), snapshot, facts.stages))
            together.each(lambda: _finish(path, snapshot.step, facts, parts) if together.leads else None)
        except BaseException:
            if together.leads:
                shutil.rmtree(files.unfinished(path), ignore_errors=True)  # the next save tries again
            raise
    return path


def _begin(path: Path, held: ExitStack) -> None:
    """Make the folder in which a checkpoint is written; two that write at once would delete each other's."""
    held.enter_context(locked(path.parent, say=to_stderr))
    files.begin(path)


_Part = tuple[
    dict[str, StoredFile], dict[str, StoredTensor], dict[int, tuple[str, ...]], dict[str, Any]
]  # files, tensors, layers by stage, values


def _write_part(place: Path, snapshot: Snapshot, stages: int) -> _Part:
    stored: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for stage, held in snapshot.tensors.items():
        name = file_name(stage, stages)
        stored[name] = write_tensors(place / name, held)
        tensors |= {
            key: StoredTensor(name, tuple(tensor.shape), dtype_name(key, tensor))
            for key, tensor in held.items()
        }
    return stored, tensors, snapshot.layers, snapshot.values


def _finish(path: Path, step: int, facts: Facts, parts: list[_Part]) -> None:
    layers = {s: names for _, _, own, _ in parts for s, names in own.items()}
    assert sorted(layers) == list(range(facts.stages)), "every stage is written by one process"
    config = dict(facts.config)
    manifest = Manifest(
        step=step,
        seed=facts.seed,
        layers=tuple(layers[s] for s in sorted(layers)),
        layout=dict(facts.layout),
        files={name: file for own, _, _, _ in parts for name, file in sorted(own.items())},
        tensors={key: tensor for _, own, _, _ in parts for key, tensor in own.items()},
        values=join_values([values for _, _, _, values in parts if values]),
        config=config,
        config_sha256=digest_of_config(config),
        versions=versions(),
    )
    finish(path, manifest)


def finish(path: Path, manifest: Manifest) -> None:
    """Write the manifest, and give the folder its name.

    Raises:
        OSError: the disk did not take it, or a file that another process wrote is not to be seen here.
    """
    place = files.unfinished(path)
    for name, file in manifest.files.items():
        if (place / name).stat().st_size != file.bytes:
            raise OSError(
                0, "is not of the size with which it was written; is the folder shared?", place / name
            )
    with open_synced(place / MANIFEST) as stream:
        stream.write(dump(manifest))
    files.commit(path)


def versions() -> dict[str, str]:
    """Of what writes."""
    return {
        "penstock": penstock.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def prune(folder: Path, keep_last: int, keep_every: int) -> list[Path]:
    """Delete checkpoints but the newest complete ones and those of every so many steps.

    Args:
        folder: of the checkpoints.
        keep_last: how many of the newest stay; 0 for all.
        keep_every: those whose step divides by it stay, too; 0 for none.

    Returns:
        What went. What is not complete stays: it is no checkpoint that could take another's place.

    Raises:
        OSError: something could not be deleted.
    """
    if not keep_last:
        return []
    complete = [(step, path) for step, path in steps_in(folder) if is_whole(path)]
    old = [path for step, path in complete[keep_last:] if not (keep_every and step % keep_every == 0)]
    for path in old:
        files.remove(path)
    return old
