"""Files of tensors in safetensors' format, written with their digest and read with ordinary reads.

The format: 8 bytes with the header's length, the header as JSON, the numbers. The library (0.8) writes a file only when all
tensors are in this process's memory at once, so that a model on a GPU would be copied as a whole; the digest could then only
be taken of what a disk returns, not of the bytes on their way to it; and its files have the mode 0600. It reads in two ways.
One maps the file into memory, and a file truncated in the meantime ends the process with SIGBUS, which Python cannot catch.
The other reads a whole tensor for every slice of it, and a rank of a sharded model needs slices only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeGuard

import torch
from pydantic import Field
from torch import Tensor

from penstock.base.atomic import open_synced
from penstock.base.bounded_io import open_regular, parse_json
from penstock.base.encoding import sendable
from penstock.base.errors import ConfigError
from penstock.base.tables import NotNegative

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes that files can keep, by their names in safetensors."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Hashing and writing a piece releases the interpreter lock, so that other threads train meanwhile.
_PIECE_BYTES = 8 << 20
_MAX_HEADER = 100_000_000  # bytes, the library's limit
_MAX_READ = 1 << 30  # bytes; the system reads at most 2^31 - 4096


@sendable
@dataclass(frozen=True)
class StoredFile:
    """A file of tensors."""

    bytes: NotNegative
    sha256: Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


def dtype_name(name: str, tensor: Tensor) -> str:
    """Return a tensor's dtype by its name in safetensors."""
    if tensor.dtype not in _NAMES:
        raise ConfigError(
            f"{name} is of {tensor.dtype}, which a checkpoint cannot keep; it keeps "
            + ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
        )
    return _NAMES[tensor.dtype]


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> StoredFile:
    """Write a new file of tensors, those on a GPU copied one by one, and flush it to the disk."""
    # Wide dtypes first: every tensor then begins at a multiple of its element's size, without gaps.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
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
    # The data begin at a multiple of 8 behind the 8 bytes of the header's length.
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    with open_synced(path) as file:
        parts = [memoryview(len(text).to_bytes(8, "little") + text)]
        for data in (*parts, *(_memory(tensors[name]) for name in order)):
            for start in range(0, len(data), _PIECE_BYTES):
                piece = data[start : start + _PIECE_BYTES]
                digest.update(piece)
                file.write(piece)
                written += len(piece)
    return StoredFile(written, digest.hexdigest())


def _memory(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes: its own memory if it is contiguous and on the CPU, else a copy's."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's entry in the header of its file."""

    shape: tuple[int, ...]
    dtype: str  # name of the dtype in safetensors, for example F32 or BF16
    # Range of its bytes in the file.
    start: int
    stop: int


class TensorFile:
    """A file of tensors, open for reading; a context manager.

    Only the header is read at first. As in `penstock.base.bounded_io`, all errors are of the operating system's kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        try:
            # Entries by name, in the order of their bytes.
            self.entries = self._header(os.fstat(self._descriptor).st_size)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, dim: int = 0, run: slice | None = None) -> Tensor:
        """Read a tensor, or a slice of it along one dimension."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise self._error(f"{name!r:.200} is {entry.dtype!r:.40}, not one of {', '.join(DTYPES)}")
        dtype, shape = DTYPES[entry.dtype], list(entry.shape)
        first, last = 0, 1
        if run is not None and shape:
            first, last, _ = run.indices(shape[dim])
            last = max(first, last)
            inner = math.prod(shape[dim + 1 :])
            first, last, whole = first * inner, last * inner, shape[dim] * inner
            shape[dim] = (last - first) // max(1, inner)
            outer = math.prod(shape[:dim])
        else:
            first, last, whole, outer = 0, math.prod(shape), math.prod(shape), 1
        try:
            tensor = torch.empty(shape, dtype=dtype)
        except RuntimeError as error:
            raise OSError(
                errno.ENOMEM, f"no memory for {name!r:.200} of shape {shape}", str(self.path)
            ) from error
        size, memory = dtype.itemsize, _memory(tensor)
        step = (last - first) * size
        # A slice along the first dimension is contiguous: one read. Along any other there is one read for each outer index.
        for n in range(outer if step else 0):
            self._fill(memory[n * step : (n + 1) * step], entry.start + (n * whole + first) * size)
        return tensor

    def _fill(self, memory: memoryview, at: int) -> None:
        while memory and (count := os.preadv(self._descriptor, [memory[:_MAX_READ]], at)):
            memory, at = memory[count:], at + count
        if memory:
            raise self._error("it became shorter while it was being read")

    def _header(self, size: int) -> dict[str, TensorEntry]:
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise self._error("it is not a file of safetensors, or is cut short")
        try:
            table = parse_json(_exactly(self._descriptor, length))
        except ValueError as error:
            raise self._error(f"its header is not JSON: {error}") from error
        if not isinstance(table, dict):
            raise self._error("its header is not a table of tensors")
        table.pop("__metadata__", None)
        entries = {name: self._entry(name, value, 8 + length) for name, value in table.items()}
        entries = dict(sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].stop)))
        at = 8 + length
        for name, entry in entries.items():
            if entry.start != at:
                raise self._error(f"{name!r:.200} does not begin where the tensor before it ends")
            at = entry.stop
        if at != size:
            raise self._error(f"it has {size:,} bytes, and its header says {at:,}")
        return entries

    def _entry(self, name: str, value: Any, first: int) -> TensorEntry:
        table = value if isinstance(value, dict) else {}
        shape, dtype, places = (table.get(key) for key in ("shape", "dtype", "data_offsets"))
        if not (_counts(shape) and _counts(places) and len(places) == 2 and isinstance(dtype, str)):
            raise self._error(f"its header says of {name!r:.200}: {value!r:.200}")
        start, stop = places
        known = DTYPES.get(dtype)
        if stop < start or (known is not None and math.prod(shape) * known.itemsize != stop - start):
            raise self._error(f"{name!r:.200} is {dtype} of shape {shape}, and has bytes {start} to {stop}")
        return TensorEntry(tuple(shape), dtype, first + start, first + stop)

    def _error(self, reason: str) -> OSError:
        return OSError(errno.EINVAL, reason, str(self.path))

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _exactly(descriptor: int, length: int) -> bytes:
    data = os.pread(descriptor, length, 8)
    if len(data) != length:
        raise ValueError("it is cut short")
    return data


def _counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in values)
