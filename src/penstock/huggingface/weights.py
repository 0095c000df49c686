"""Weights on disk: safetensors files with the names of the whole model, in Hugging Face's layout.

One process writes ``model.safetensors``; n processes write a part each, ``model-00001-of-0000n.safetensors`` and so
on, and ``model.safetensors.index.json`` says which name is where.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.atomic import replacing, write_text
from penstock.errors import PenstockError
from penstock.huggingface.model_folder import INDEX, WEIGHTS, read_tensors, stored_tensors
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup
from penstock.tensor_file import TensorFile, write_tensors

_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def own_state(pipe: Pipeline) -> dict[str, Any]:
    """The pipeline's state without the tied weights whose first layer another process has, which writes them."""
    here = tuple(f"{name}." for stage in pipe.stages.values() for name in stage.module.names)
    return {name: value for name, value in pipe.state_dict().items() if name.startswith(here)}


def save_part(folder: Path, state: Mapping[str, Tensor], part: int, parts: int) -> Path:
    """Write one process's weights under a temporary name, then rename.

    Args:
        folder: of the run.
        state: by whole-model name.
        part: from 0 to parts - 1.
        parts: how many processes write.

    Raises:
        PenstockError: the disk did not take them; an earlier file is as it was.
    """
    path = folder / (WEIGHTS if parts == 1 else f"model-{part + 1:05d}-of-{parts:05d}.safetensors")
    try:
        with replacing(path) as unfinished:
            write_tensors(unfinished, state, {"format": "pt"})
    except (OSError, MemoryError) as error:
        raise PenstockError(f"cannot write the weights {path}: {error}") from error
    return path


def save_together(group: RunGroup, pipe: Pipeline, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write the weights of every pipeline rank, each once, and their index; every process calls it with its own.

    Raises:
        PenstockError: on every process, if one of them could not write its part.
    """
    parts, part = (pipe.ranks, pipe.rank) if pipe.in_processes else (1, 0)
    group.each(lambda: save_part(folder, state, part, parts) if pipe.is_first else None)
    group.decide(lambda: write_index(folder, parts))


def write_index(folder: Path, parts: int) -> None:
    """Write the index of `parts` files, all of them complete; a single file needs none.

    Weights of an earlier save in the folder go: a reader takes a single file before it looks for an index.
    """
    for path in folder.glob("model*.safetensors"):
        ours = path.name == WEIGHTS if parts == 1 else path.name.endswith(f"-of-{parts:05d}.safetensors")
        if not ours and (path.name == WEIGHTS or _PART.fullmatch(path.name)):
            path.unlink()
    if parts == 1:
        (folder / INDEX).unlink(missing_ok=True)
        return
    places: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob(f"model-*-of-{parts:05d}.safetensors")):
        with TensorFile(path) as file:
            for name, entry in file.entries.items():
                places[name], sizes[name] = (
                    path.name,
                    entry.stop - entry.start,
                )  # a copy on another rank counts once
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
    write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def load(folder: Path) -> dict[str, Tensor]:
    """Read all weights of a run, by name in the whole model.

    Raises:
        DataError: if there are no weights, or a file is missing or damaged.
    """
    return read_tensors(stored_tensors(folder))
