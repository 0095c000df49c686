"""A folder as Hugging Face leaves it: which tensors its safetensors files hold, and one layer's worth of them at a time.

Only headers are read to know what is there; nothing in a folder can run code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.bounded_io import MEGABYTE, parse_json, read_bytes
from penstock.errors import DataError
from penstock.tensor_file import DTYPES, TensorFile

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

_MAX_JSON = 512 * MEGABYTE
_FLOATING = ("F64", "F32", "F16", "BF16")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        path: of the file.
        name: within the file.
        shape: its sizes.
        dtype: as safetensors writes it: ``F32``, ``BF16``.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
        DataError: it cannot be read, or is none.
    """
    try:
        found = parse_json(read_bytes(path, _MAX_JSON))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} must hold a JSON object, not {type(found).__name__}")
    return found


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's safetensors files, by name, from their headers.

    Raises:
        DataError: no safetensors, a file that is missing or damaged, or an index that says otherwise than the files.
    """
    if (folder / WEIGHTS).is_file():
        return _header(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        hint = (
            f"; {pickles[0]} is a pickle, which can run code when it is loaded, and is not read: load it with "
            "transformers where you trust it and save it again with save_pretrained"
            if pickles
            else ""
        )
        raise DataError(f"{folder} holds no weights: neither {WEIGHTS} nor {INDEX}{hint}")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")
        for name in places.values()
    ):
        raise DataError(
            f"{folder / INDEX} has no weight_map from tensor names to safetensors files beside it"
        )
    found: dict[str, Stored] = {}
    for file in sorted(set(places.values())):
        found |= _header(folder / file)
    wrong = [
        f"{name} is not in {file}" for name, file in sorted(places.items()) if not _lies(found, name, file)
    ]
    wrong += [
        f"{name} of {found[name].path.name} is not in the index" for name in found if name not in places
    ]
    if wrong:
        raise DataError(f"{folder / INDEX} does not describe its files: " + "; ".join(wrong))
    return found


def _lies(found: Mapping[str, Stored], name: str, file: str) -> bool:
    return name in found and found[name].path.name == file


def _header(path: Path) -> dict[str, Stored]:
    try:
        with TensorFile(path) as file:
            return {
                name: Stored(path, name, entry.shape, entry.dtype) for name, entry in file.entries.items()
            }
    except OSError as error:
        raise DataError(f"cannot read the weights {path}: {error.strerror}") from error


def matched(
    folder: Path,
    stored: Mapping[str, Stored],
    wanted: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    ignored: Iterable[str],
    base: str,
) -> dict[str, Stored]:
    """The stored tensor of every name of the model.

    Args:
        folder: for the error.
        stored: as `stored_tensors` gives them.
        wanted: the model's names and shapes.
        tied: names that are one tensor with another: either of the two may be missing.
        ignored: regular expressions of names that old files have and the model has no more.
        base: the first part of the inner model's names, which files saved without a head leave out.

    Raises:
        DataError: tensors that are missing, unknown, of another shape or no floating-point numbers; all are listed.
    """
    if not any(name.startswith(f"{base}.") for name in stored):
        stored = {name if name in wanted else f"{base}.{name}": tensor for name, tensor in stored.items()}
    found = dict(stored)
    for one, other in tied.items():
        if one in found and other not in found:
            found[other] = found[one]
        elif other in found and one not in found:
            found[one] = found[other]
    problems = [f"{name} is missing" for name in wanted if name not in found]
    for name, tensor in found.items():
        if name not in wanted:
            if not any(re.search(pattern, name) for pattern in ignored):
                problems.append(f"{name} is unknown")
        elif tensor.shape != wanted[name]:
            problems.append(f"{name} has shape {tensor.shape}, not {wanted[name]}")
        elif tensor.dtype not in _FLOATING:
            problems.append(f"{name} is {tensor.dtype}, not one of {', '.join(_FLOATING)}")
    if problems:
        raise DataError(f"the weights in {folder} do not fit its {CONFIG}: " + "; ".join(problems))
    return {name: found[name] for name in wanted}


def dtype_of(stored: Mapping[str, Stored]) -> torch.dtype | None:
    """Return the dtype of the first floating-point tensor in the order of the files; None without one."""
    return next((DTYPES[tensor.dtype] for tensor in stored.values() if tensor.dtype in _FLOATING), None)


def read_tensors(wanted: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Read some tensors, each file opened once.

    Raises:
        DataError: a file can no longer be read, or holds something else than it did.
    """
    by_file: dict[Path, list[str]] = {}
    for name, tensor in wanted.items():
        by_file.setdefault(tensor.path, []).append(name)
    found: dict[str, Tensor] = {}
    for path, names in by_file.items():
        try:
            with TensorFile(path) as file:
                for name in names:
                    if wanted[name].name not in file.entries:
                        raise DataError(f"{path} no longer has the tensor {wanted[name].name!r:.200}")
                    found[name] = file.read(wanted[name].name)
        except (OSError, MemoryError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no memory"
            raise DataError(f"cannot read the weights {path}: {reason}") from error
    return found


def equal(one: Stored, other: Stored) -> bool:
    """Whether two stored tensors hold the same values."""
    found = read_tensors({"one": one, "other": other})
    return torch.equal(found["one"], found["other"])
