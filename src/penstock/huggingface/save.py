"""Saving of a pipeline's weights as a folder for ``from_pretrained`` of the library's classes and `from_transformers`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from penstock.base.atomic import write_text
from penstock.base.errors import ConfigError, os_errors_as
from penstock.huggingface.from_transformers import (
    STORED_NAMES,
    config_from,
    local_folder,
    on_meta,
    tied_names,
)
from penstock.huggingface.heads import HEADS, classes_of, head_in, head_of
from penstock.huggingface.library import require_library
from penstock.huggingface.model_folder import CONFIG, read_json
from penstock.huggingface.weights import own_state, save_together
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup
from penstock.stage.layers import whole_name

T = TypeVar("T")

_MAX_LISTED = 12  # problems in an error message

COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Files of the original folder that are copied in addition to config and weights."""


def save_transformers(pipe: Pipeline, folder: str | os.PathLike[str], like: object) -> None:
    """Write a pipeline's weights in Hugging Face's layout; in processes every rank calls this and writes its own part.

    The folder gets ``config.json``, ``model.safetensors`` (from several processes one file per rank and an index), and the
    generation config and tokenizer files of `like`, if it has them. Weights of an earlier save are replaced. Adapters
    are not merged: `penstock.save_adapters` saves them, and peft merges them (``merge_and_unload``).

    Args:
        pipe: pipeline of the layers that `from_transformers` returned.
        folder: folder to write; created if it does not exist.
        like: argument of `from_transformers`: the model, the config, the folder or the file.

    Raises:
        ConfigError: on every process, before anything is written: if `like` is none of these, the folder cannot be
            created, or the weights do not fit the architecture (for example with adapters of your own), so that the
            folder would load with new weights.
    """
    require_library()
    path = Path(folder).expanduser()
    config = config_of(like)
    state = _as_stored(pipe, config)
    run_group = RunGroup.of(pipe.world)
    parts = run_group.each(lambda: {name: tuple(value.shape) for name, value in state.items()})
    require_loadable({name: shape for part in parts for name, shape in part.items()}, config)
    with os_errors_as(ConfigError, f"cannot make the folder {path}"):
        path.mkdir(parents=True, exist_ok=True)
    save_together(run_group, pipe, state, path)
    run_group.decide(lambda: write_beside(path, config, state, like))


def _as_stored(pipe: Pipeline, config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the pipeline's state by the names in files, without second names of tied parameters."""
    tied = {whole_name(layer.name, inner) for layer in pipe.layers for inner in layer.tied}
    state = {name: value for name, value in own_state(pipe).items() if name not in tied}
    return stored_names(state, config)


def stored_names(state: Mapping[str, T], config: dict[str, Any]) -> dict[str, T]:
    """Rename weights from their names in the model to those in files of the config's family."""
    stored = STORED_NAMES.get(config["model_type"], {})
    return {stored.get(name, name): value for name, value in state.items()}


def require_loadable(shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]) -> None:
    """Require that the architecture of a config would load all weights.

    Raises:
        ConfigError: if names are missing, unknown, or of another shape; lists all.
    """
    pattern = on_meta(config_from(dict(config), CONFIG, HEADS))
    wanted = stored_names(dict(pattern.state_dict()), config)
    tied = stored_names(dict.fromkeys(tied_names(pattern)), config)
    problems = [f"{n} is missing" for n in wanted if n not in shapes and n not in tied]
    for name, shape in shapes.items():
        if name not in wanted:
            problems.append(f"{name} is unknown")
        elif shape != tuple(wanted[name].shape):
            problems.append(f"{name} has shape {shape}, not {tuple(wanted[name].shape)}")
        elif name in tied:
            problems.append(f"{name} is a separate weight, which the config ties to another")
    if problems:
        more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise ConfigError(
            f"these weights do not fit the {config.get('model_type')} model that the config describes: "
            f"{'; '.join(problems[:_MAX_LISTED])}{more}. Save adapters with penstock.save_adapters, or merge them "
            "with peft (merge_and_unload), see docs/fine_tuning.md; or keep all weights with penstock.Checkpoints"
        )


def write_beside(folder: Path, config: dict[str, Any], state: dict[str, Tensor], like: object) -> None:
    """Write the config with the weights' dtype, and copy the files that `like` has."""
    dtype = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), None)
    config.pop("torch_dtype", None)
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    write_text(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = getattr(like, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    if isinstance(like, str | os.PathLike):
        copy_files(_config_file(like).parent, folder)


def copy_files(source: Path, folder: Path) -> None:
    """Copy the `COPIED_FILES` that a folder has to another folder."""
    for name in COPIED_FILES:
        if (source / name).is_file() and source.resolve() != folder.resolve():
            shutil.copyfile(source / name, folder / name)


def config_of(like: object) -> dict[str, Any]:
    """Return the contents of ``config.json``, with the class of the model."""
    from transformers import PreTrainedConfig, PreTrainedModel

    if isinstance(like, str | os.PathLike):
        return read_json(_config_file(like))
    model: Any = like if isinstance(like, PreTrainedModel) else None
    config: Any = like if model is None else model.config
    if not isinstance(config, PreTrainedConfig):
        raise ConfigError(
            f"like must be the model, the config or the folder that the layers came from, got {like!r}"
        )
    table: dict[str, Any] = config.to_diff_dict()
    head = head_in(config) if model is None else head_of(model)
    table["architectures"] = [classes_of(config, head)[0].__name__]
    return table


def _config_file(like: str | os.PathLike[str]) -> Path:
    path = Path(like).expanduser()
    return path if path.is_file() else local_folder(like) / CONFIG
