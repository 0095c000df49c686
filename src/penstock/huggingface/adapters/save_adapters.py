"""Saving of a pipeline's adapters in peft's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import copy
import os
from pathlib import Path

from torch import Tensor

from penstock.base.atomic import replacing
from penstock.base.errors import ConfigError, PenstockError
from penstock.base.tensor_file import write_tensors
from penstock.huggingface.adapters.adapted_model import Adapters, adapters_of
from penstock.huggingface.adapters.supported import ADAPTER_WEIGHTS
from penstock.huggingface.model_folder import read_header, read_tensors
from penstock.huggingface.save import copy_files
from penstock.huggingface.weights import own_state
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup

_MAX_LISTED = 12  # problems in an error message


def save_adapters(pipe: Pipeline, folder: str | os.PathLike[str]) -> None:
    """Write a pipeline's adapters as a folder for ``PeftModel.from_pretrained`` and `from_transformers`.

    In processes every rank calls this. The folder gets ``adapter_config.json``, which names the base model,
    ``adapter_model.safetensors`` with the adapters of all ranks, and the base's tokenizer files, if it is a local folder.
    Adapters of an earlier save are replaced.

    Args:
        pipe: pipeline of the layers that `from_transformers` returned for a model with adapters.
        folder: folder to write; created if it does not exist.

    Raises:
        ConfigError: on every process, before anything is written: if the model has no adapters, the folder cannot be
            created, or weights outside the adapters are trained, which the folder would lose.
        PenstockError: on every process, if a file cannot be written.
    """
    path = Path(folder).expanduser()
    adapters = adapters_of(pipe.layers)
    if adapters is None:
        raise ConfigError(
            "the pipeline's model has no adapters that penstock.from_transformers knows; give it adapters=..., or a "
            "PeftModel. penstock.save_transformers saves whole models"
        )
    names = adapters.saved_names
    run_group = RunGroup.of(pipe)
    trained = run_group.each(lambda: [name for name, p in pipe.named_parameters() if p.requires_grad])
    if others := sorted({name for part in trained for name in part} - {*names}):
        more = f" and {len(others) - _MAX_LISTED} more" if len(others) > _MAX_LISTED else ""
        raise ConfigError(
            f"weights outside the adapters are trained, and a folder of adapters would lose them: "
            f"{', '.join(others[:_MAX_LISTED])}{more}; freeze them, name their modules in modules_to_save, or save all: "
            "penstock.save_transformers"
        )
    state = {names[name]: value for name, value in own_state(pipe).items() if name in names}
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}") from error
    parts = pipe.ranks if pipe.in_processes else 1
    if parts > 1:
        part = path / _part(pipe.rank)
        run_group.each(lambda: _write(part, state) if pipe.is_first else None)
    run_group.decide(lambda: _finish(path, adapters, state, parts))


def _part(rank: int) -> str:
    return f".adapter-part-{rank:05d}.safetensors"


def _write(path: Path, state: dict[str, Tensor]) -> None:
    try:
        with replacing(path) as unfinished:
            write_tensors(unfinished, state, {"format": "pt"})
    except (OSError, MemoryError) as error:
        raise PenstockError(f"cannot write the adapters {path}: {error}") from error


def _finish(path: Path, adapters: Adapters, state: dict[str, Tensor], parts: int) -> None:
    """Join the parts of all ranks to one file, as peft reads no others, and write the config; for the leader alone."""
    files = [path / _part(rank) for rank in range(parts)] if parts > 1 else []
    for file in files:
        state |= read_tensors(read_header(file))
    missing = {*adapters.saved_names.values()} - {*state}
    assert not missing, f"every adapter is on a rank, not {missing}"
    _write(path / ADAPTER_WEIGHTS, dict(sorted(state.items())))
    config = copy.deepcopy(adapters.config)
    config.inference_mode, config.base_model_name_or_path = True, adapters.base or None
    for key in ("target_modules", "exclude_modules"):
        if isinstance(getattr(config, key), set):
            setattr(config, key, sorted(getattr(config, key)))  # the same file every time
    config.save_pretrained(str(path))
    for file in files:
        file.unlink()
    if adapters.base and os.path.isdir(adapters.base):
        copy_files(Path(adapters.base), path)
