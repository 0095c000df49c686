"""Weights of a pipeline on disk: safetensors files in Hugging Face's layout, with the names of the whole model.

One process writes ``model.safetensors``. Of n processes each writes a part, ``model-00001-of-0000n.safetensors`` and so
on, and ``model.safetensors.index.json`` maps names to files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.base.atomic import replacing, write_text
from penstock.base.errors import PenstockError
from penstock.base.tensor_file import TensorFile, write_tensors
from penstock.huggingface.model_folder import INDEX, WEIGHTS, read_tensors, stored_tensors
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup
from penstock.stage.layers import begins_in, prefixes

_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def own_state(pipe: Pipeline) -> dict[str, Any]:
    """Return the pipeline's state without tied weights whose first layer is on another process, which writes them."""
    here = {p for stage in pipe.stages.values() for name in stage.module.names for p in prefixes(name)}
    return {name: value for name, value in pipe.state_dict().items() if begins_in(name, here)}


def save_part(folder: Path, state: Mapping[str, Tensor], part: int, parts: int) -> Path:
    """Write one process's weights under a temporary name, then rename the file.

    Args:
        part: index of this part, from 0 to parts - 1.

    Raises:
        PenstockError: if the file cannot be written; an earlier file is unchanged.
    """
    path = folder / (WEIGHTS if parts == 1 else f"model-{part + 1:05d}-of-{parts:05d}.safetensors")
    try:
        with replacing(path) as unfinished:
            write_tensors(unfinished, state, {"format": "pt"})
    except (OSError, MemoryError) as error:
        raise PenstockError(f"cannot write the weights {path}: {error}") from error
    return path


def save_together(group: RunGroup, pipe: Pipeline, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write each pipeline rank's weights once, and their index; every process calls this with its own state.

    Raises:
        PenstockError: on every process, if one could not write its part.
    """
    parts, part = (pipe.ranks, pipe.rank) if pipe.in_processes else (1, 0)
    group.each(lambda: save_part(folder, state, part, parts) if pipe.is_first else None)
    group.decide(lambda: write_index(folder, parts))


def write_index(folder: Path, parts: int) -> None:
    """Write the index of `parts` complete files; a single file needs none.

    Weights of an earlier save are deleted: a reader prefers a single file to an index.
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
                places[name] = path.name
                sizes[name] = entry.stop - entry.start  # a copy on another rank counts once
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
    write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def load(folder: Path) -> dict[str, Tensor]:
    """Read all weights of a run, by name in the whole model.

    Raises:
        DataError: if there are no weights, or a file is missing or damaged.
    """
    return read_tensors(stored_tensors(folder))
