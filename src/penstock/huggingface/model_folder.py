"""Reader of a model folder in Hugging Face's layout, which reads only the tensors that are needed.

The list of tensors comes from the headers of safetensors files alone; nothing in a folder can run code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.base.bounded_io import MEGABYTE, parse_json, read_bytes
from penstock.base.errors import DataError, os_errors_as
from penstock.base.tensor_file import DTYPES, TensorFile

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
        dtype: name of the dtype in safetensors, for example ``F32`` or ``BF16``.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Converted(Stored):
    """A tensor of the model that is made of several stored ones.

    Attributes:
        name: name in the model.
        convert: function from the tensors of `sources` to all that is made of them, by name.
    """

    sources: tuple[Stored, ...]
    convert: Callable[[Sequence[Tensor]], dict[str, Tensor]]


def is_floating(tensor: Stored) -> bool:
    """Return whether a stored tensor has floating-point numbers of a dtype that a model can have."""
    return tensor.dtype in _FLOATING


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        DataError: if the file cannot be read, or has no JSON object.
    """
    try:
        table = parse_json(read_bytes(path, _MAX_JSON))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise DataError(f"{path} must hold a JSON object, got {type(table).__name__}")
    return table


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return all tensors of a folder's safetensors files by name, from their headers.

    Raises:
        DataError: if there is no safetensors file, a file is missing or damaged, or the index contradicts the files.
    """
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
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
    stored: dict[str, Stored] = {}
    for file in sorted(set(places.values())):
        stored |= read_header(folder / file)
    wrong = [
        f"{name} is not in {file}"
        for name, file in sorted(places.items())
        if name not in stored or stored[name].path.name != file
    ]
    wrong += [
        f"{n} of {tensor.path.name} is not in the index" for n, tensor in stored.items() if n not in places
    ]
    if wrong:
        raise DataError(f"{folder / INDEX} does not describe its files: " + "; ".join(wrong))
    return stored


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name, from its header.

    Raises:
        DataError: if the file is missing or damaged.
    """
    with os_errors_as(DataError, f"cannot read the weights {path}"), TensorFile(path) as file:
        return {name: Stored(path, name, entry.shape, entry.dtype) for name, entry in file.entries.items()}


def matched(
    folder: Path,
    stored: Mapping[str, Stored],
    wanted: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    ignored: Iterable[str],
    base: str,
) -> dict[str, Stored]:
    """Return the stored tensor for every name of the model.

    Args:
        tied: pairs of names of one tensor; either name may be missing.
        ignored: regular expressions of names in old files that the model no longer has.
        base: prefix of the inner model's names, which files saved without a head omit.

    Raises:
        DataError: if tensors are missing, unknown, of another shape or not of floating-point numbers; lists all.
    """
    if not any(name.startswith(f"{base}.") for name in stored):
        stored = {name if name in wanted else f"{base}.{name}": tensor for name, tensor in stored.items()}
    matches = dict(stored)
    for one, other in tied.items():
        if one in matches and other not in matches:
            matches[other] = matches[one]
        elif other in matches and one not in matches:
            matches[one] = matches[other]
    problems = [f"{name} is missing" for name in wanted if name not in matches]
    for name, tensor in matches.items():
        if name not in wanted:
            if not any(re.search(pattern, name) for pattern in ignored):
                problems.append(f"{name} is unknown")
        elif tensor.shape != wanted[name]:
            problems.append(f"{name} has shape {tensor.shape}, not {wanted[name]}")
        elif not is_floating(tensor):
            problems.append(f"{name} is {tensor.dtype}, not one of {', '.join(_FLOATING)}")
    if problems:
        raise DataError(f"the weights in {folder} do not fit its {CONFIG}: " + "; ".join(problems))
    return {name: matches[name] for name in wanted}


def dtype_of(stored: Mapping[str, Stored]) -> torch.dtype | None:
    """Return the dtype of the first floating-point tensor in the order of the files; None without one."""
    return next((DTYPES[tensor.dtype] for tensor in stored.values() if tensor.dtype in _FLOATING), None)


def read_tensors(wanted: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Read tensors, opening each file once; for a converted one, all that it is made of.

    Raises:
        DataError: if a file can no longer be read, or its content has changed.
    """
    by_file: dict[Path, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in wanted.items():
        if isinstance(tensor, Converted):
            parts = read_tensors({str(n): source for n, source in enumerate(tensor.sources)})
            tensors[name] = tensor.convert([parts[str(n)] for n in range(len(parts))])[tensor.name]
        else:
            by_file.setdefault(tensor.path, []).append(name)
    for path, names in by_file.items():
        try:
            with TensorFile(path) as file:
                for name in names:
                    if wanted[name].name not in file.entries:
                        raise DataError(f"{path} no longer has the tensor {wanted[name].name!r:.200}")
                    tensors[name] = file.read(wanted[name].name)
        except (OSError, MemoryError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no memory"
            raise DataError(f"cannot read the weights {path}: {reason}") from error
    return tensors


def equal(one: Stored, other: Stored) -> bool:
    """Return whether two stored tensors have the same values."""
    tensors = read_tensors({"one": one, "other": other})
    return torch.equal(tensors["one"], tensors["other"])
