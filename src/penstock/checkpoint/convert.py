"""Conversion of checkpoints to another split, a file of weights, or a Hugging Face folder; no model is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from penstock.base.atomic import replacing
from penstock.base.counts import plural
from penstock.base.errors import ConfigError, DataError, os_errors_as
from penstock.base.tensor_file import write_tensors
from penstock.checkpoint import whole_folder
from penstock.checkpoint.find import damage, is_checkpoint, read_manifest
from penstock.checkpoint.frozen_weights import require_all_weights
from penstock.checkpoint.manifest import Manifest
from penstock.checkpoint.read import Reader
from penstock.checkpoint.snapshot import layer_of
from penstock.checkpoint.write import finish, write_stages
from penstock.huggingface import weights
from penstock.stage.layers import prefixes


def open_sound(path: Path) -> Manifest:
    """Return a checkpoint's manifest after checking all its files."""
    manifest = read_manifest(path)
    if wrong := damage(path, manifest):
        raise DataError("; ".join(wrong))
    return manifest


def require_new(target: Path) -> None:
    """Require that nothing would be overwritten."""
    if os.path.lexists(target):
        raise ConfigError(f"{target} already exists; choose another path, or remove it")


def resplit(source: Path, target: Path, stages: int) -> Manifest:
    """Write a checkpoint in files for another number of stages, with layers divided as evenly as possible.

    Args:
        target: folder to create, with the name of `source`, so that it can be loaded.
    """
    require_new(target)
    if not is_checkpoint(target):
        raise ConfigError(f"{target} must be called {source.name}, so that it is known as a checkpoint")
    manifest = open_sound(source)
    names = [name for run in manifest.layers for name in run]
    if not 1 <= stages <= len(names):
        raise ConfigError(
            f"the model has {len(names)} layers; they make 1 to {plural(len(names), 'stage')}, got {stages}"
        )
    cuts = [s * len(names) // stages for s in range(stages + 1)]
    layers = tuple(tuple(names[a:b]) for a, b in pairwise(cuts))
    with Reader(source, manifest) as reader:
        return rewrite(target, replace(manifest, layers=layers), list(manifest.tensors), reader.tensor)


def rewrite(
    target: Path, manifest: Manifest, names: Sequence[str], tensor: Callable[[str], Tensor]
) -> Manifest:
    """Write a checkpoint of given tensors."""
    stage_of = {start: s for s, run in enumerate(manifest.layers) for name in run for start in prefixes(name)}
    by_stage: list[list[str]] = [[] for _ in manifest.layers]
    for name in names:
        by_stage[_stage(name, stage_of)].append(name)
    tensors = ((stage, {name: tensor(name) for name in held}) for stage, held in enumerate(by_stage))
    with os_errors_as(ConfigError, f"cannot write {target}"):
        written, listed = write_stages(whole_folder.begin(target), tensors, len(by_stage))
        rewritten = replace(manifest, files=written, tensors=listed)
        finish(target, rewritten)
    return rewritten


def _stage(name: str, stage_of: dict[str, int]) -> int:
    """Return the stage of a tensor's layer; tensors of no layer are in the first stage's file."""
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        rest = rest.partition("/")[2]
    return stage_of.get(layer_of(rest, stage_of), 0)


def model_weights(source: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return the model's tensors by their names in the whole model."""
    require_all_weights(manifest.values, source)
    with Reader(source, manifest) as reader:
        return {
            name.removeprefix("model/"): reader.tensor(name)
            for name in manifest.tensors
            if name.startswith("model/")
        }


def export_weights(source: Path, target: Path) -> None:
    """Write a checkpoint's weights as a ``.safetensors`` or ``.pt`` file with all names that ``load_state_dict`` takes."""
    require_new(target)
    if target.suffix not in (".safetensors", ".pt"):
        raise ConfigError(f"{target} must end in .safetensors or .pt, so that it is known what to write")
    manifest = open_sound(source)
    state = model_weights(source, manifest)
    tied = manifest.values.get("tied", {})
    if not isinstance(tied, dict) or not all(isinstance(f, str) and f in state for f in tied.values()):
        raise DataError(f"{source}: 'tied' must name weights of the checkpoint, got {tied!r:.80}")
    state |= {name: state[first] for name, first in tied.items()}
    with os_errors_as(ConfigError, f"cannot write {target}"), replacing(target) as unfinished:
        if target.suffix == ".pt":
            # Opened here, since torch.save raises a RuntimeError, not an OSError, for a path that cannot be opened.
            with unfinished.open("wb") as file:
                torch.save(state, file)
        else:
            write_tensors(unfinished, state, {"format": "pt"})


def export_transformers(source: Path, target: Path) -> None:
    """Write a checkpoint's weights as a folder for ``from_pretrained``, with the files of the model it began with."""
    from penstock.huggingface import save
    from penstock.huggingface.library import require_library

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
    with os_errors_as(ConfigError, f"cannot write {target}"):
        target.mkdir(parents=True)
        weights.save_part(target, state, 0, 1)
        save.write_beside(target, config, state, like)
