"""Checkpoints written anew: in files for another split, and as a Hugging Face folder. Nothing is trained or built."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from penstock.checkpoint.find import damage, is_checkpoint, read_manifest
from penstock.checkpoint.format import files
from penstock.checkpoint.format.manifest import Manifest, StoredTensor
from penstock.checkpoint.read import Reader
from penstock.checkpoint.write import file_name, finish
from penstock.errors import ConfigError, DataError
from penstock.huggingface import weights
from penstock.tensor_file import StoredFile, dtype_name, write_tensors


def open_sound(path: Path) -> Manifest:
    """The manifest of a checkpoint all of whose files are sound.

    Raises:
        DataError: one is not; all are named.
    """
    manifest = read_manifest(path)
    if wrong := damage(path, manifest):
        raise DataError("; ".join(wrong))
    return manifest


def require_new(target: Path) -> None:
    """Refuse to write over something.

    Raises:
        ConfigError: there is something.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} already exists; choose another folder or remove it")


def resplit(source: Path, target: Path, stages: int) -> Manifest:
    """Write a checkpoint in files for so many stages, runs of layers as equal as can be.

    Args:
        source: a checkpoint.
        target: a folder that is not there yet; to be loaded it must be called as the checkpoint is.
        stages: at most as many as the model has layers.

    Raises:
        ConfigError: too many stages, or something is in the way.
        DataError: the checkpoint is damaged.
    """
    require_new(target)
    if not is_checkpoint(target):
        raise ConfigError(f"{target} must be called {source.name}, so that it is known as a checkpoint")
    manifest = open_sound(source)
    names = [name for run in manifest.layers for name in run]
    if not 1 <= stages <= len(names):
        raise ConfigError(
            f"the model has {len(names)} layers; they make 1 to {len(names)} stages, not {stages}"
        )
    cuts = [s * len(names) // stages for s in range(stages + 1)]
    layers = tuple(tuple(names[a:b]) for a, b in pairwise(cuts))
    with Reader(source, manifest) as reader:
        return rewrite(target, replace(manifest, layers=layers), list(manifest.tensors), reader.tensor)


def rewrite(
    target: Path, manifest: Manifest, names: Sequence[str], tensor: Callable[[str], Tensor]
) -> Manifest:
    """Write a checkpoint with these tensors.

    Args:
        target: a folder that is not there yet.
        manifest: what it is to say, but for files and tensors.
        names: of all tensors.
        tensor: gives one of them.

    Raises:
        ConfigError: something is in the way.
    """
    stages = len(manifest.layers)
    stage_of = {name: s for s, run in enumerate(manifest.layers) for name in run}
    held: list[list[str]] = [[] for _ in manifest.layers]
    for name in names:
        held[_stage(name, stage_of)].append(name)
    stored: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    try:
        place = files.begin(target)
        for s, own in enumerate(held):
            file, part = file_name(s, stages), {name: tensor(name) for name in own}
            stored[file] = write_tensors(place / file, part)
            tensors |= {
                name: StoredTensor(file, tuple(value.shape), dtype_name(name, value))
                for name, value in part.items()
            }
        found = replace(manifest, files=stored, tensors=tensors)
        finish(target, found)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error
    return found


def _stage(name: str, stage_of: dict[str, int]) -> int:
    """The stage of a tensor's layer; the first one's file holds what belongs to no layer."""
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        rest = rest.partition("/")[2]
    prefixes = (rest[:at] for at, letter in enumerate(rest) if letter == ".")
    return next((stage_of[prefix] for prefix in prefixes if prefix in stage_of), 0)


def model_weights(source: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The model's tensors by their names in the whole model."""
    with Reader(source, manifest) as reader:
        return {
            name.removeprefix("model/"): reader.tensor(name)
            for name in manifest.tensors
            if name.startswith("model/")
        }


def export_transformers(source: Path, target: Path) -> None:
    """Write the weights of a checkpoint as a folder that ``from_pretrained`` reads.

    Args:
        source: a checkpoint of a run of a Hugging Face model (``model.path`` or ``model.config``), whose folder or file is
            still there.
        target: a folder that is not there yet.

    Raises:
        ConfigError: it is of another model, or something is in the way.
        DataError: the checkpoint is damaged.
    """
    from penstock.huggingface import save
    from penstock.huggingface.families import require_library

    require_new(target)
    manifest = open_sound(source)
    model = manifest.config.get("model")
    like = (model.get("path") or model.get("config")) if isinstance(model, dict) else None
    if not isinstance(like, str) or not like:
        raise ConfigError(
            f"{source} is not of a Hugging Face model (its config has neither model.path nor model.config); its tensors "
            "are safetensors as they are"
        )
    require_library()
    config = save.config_of(like)
    state = save.stored_names(model_weights(source, manifest), config)
    save.require_loadable({name: tuple(value.shape) for name, value in state.items()}, config)
    try:
        target.mkdir(parents=True)
        weights.save_part(target, state, 0, 1)
        save.write_beside(target, config, state, like)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error
