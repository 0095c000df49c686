"""Files that survive: tensors written with their digest, everything on disk before a folder gets its name.

The format is safetensors' (8 bytes with the header's length, the header as JSON, the numbers). It is written here and not
by the library because the digest is taken of the bytes on their way to the disk, not of what a disk gives back, and
because other threads train on meanwhile: hashing and writing large pieces lets go of the interpreter.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.train.checkpoint.manifest import StoredFile

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

UNFINISHED = ".unfinished"
_PIECE = 8 << 20


def dtype_name(name: str, tensor: Tensor) -> str:
    """A tensor's dtype as safetensors writes it.

    Raises:
        ConfigError: it has none there.
    """
    if tensor.dtype not in DTYPES:
        raise ConfigError(
            f"{name} is of {tensor.dtype}, which a checkpoint cannot keep; it keeps "
            + ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        )
    return DTYPES[tensor.dtype]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    """Write a safetensors file and see it on the disk.

    Args:
        path: of a file that is not there yet.
        tensors: on the CPU, by name.

    Raises:
        OSError: the disk did not take it.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": dtype_name(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    with path.open("xb") as file:
        parts = [memoryview(len(text).to_bytes(8, "little") + text)]
        for data in (*parts, *(_memory(tensors[name]) for name in order)):
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                digest.update(piece)
                file.write(piece)
                written += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(written, digest.hexdigest())


def _memory(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file and see it on the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """See a folder's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(path: Path) -> Path:
    """The name that a folder has until it is complete, and again before it goes."""
    return path.with_name(f".{path.name}{UNFINISHED}")


def begin(path: Path) -> Path:
    """Make the folder in which `path` will be written, and see that what earlier saves left unfinished is gone.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".*{UNFINISHED}"):
        shutil.rmtree(left)
    place = unfinished(path)
    place.mkdir()
    return place


def commit(path: Path) -> None:
    """Give a folder whose files are all on the disk its name; one that has the name already goes.

    Raises:
        OSError: the disk did not take it.
    """
    place = unfinished(path)
    sync_folder(place)
    if path.exists():
        before = path.with_name(f".{path.name}.before{UNFINISHED}")
        path.rename(before)
        place.rename(path)
        shutil.rmtree(before)
    else:
        place.rename(path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Delete a folder; half deleted, it no longer has its name.

    Raises:
        OSError: it cannot be.
    """
    place = unfinished(path)
    path.rename(place)
    shutil.rmtree(place)


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
