"""Reader of folders that ``torch.distributed.checkpoint`` (DCP) wrote; nothing is unpickled.

Such a folder has a ``.metadata``, a pickle that lists each entry's chunks with their places, and ``.distcp`` files with the
chunks. Each chunk is an archive of ``torch.save``: a zip with a pickle and the bytes of storages. The pickles are parsed as
data (`penstock.checkpoint.dcp.pickle_parser`), so a malicious folder cannot run code.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.bounded_io import MEGABYTE, read_bytes, require_regular
from penstock.checkpoint.dcp.pickle_parser import GlobalStub, ObjectStub, parse
from penstock.errors import DataError
from penstock.tensor_file import DTYPES

_MAX_METADATA = 512 * MEGABYTE
_MAX_VALUES = 1_000_000  # in one entry that is not a tensor
_MAX_DEPTH = 100
_DTYPES = {GlobalStub("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()}
_MALFORMED = (
    LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, EOFError, MemoryError,
    struct.error, zipfile.BadZipFile,
)  # fmt: skip
"""Errors that stubs of unexpected content raise, and those of zipfile at a damaged archive."""
_ORDERED_DICT = GlobalStub("collections", "OrderedDict")
_SIZE = GlobalStub("torch", "Size")
_REBUILD = (
    GlobalStub("torch._utils", "_rebuild_tensor_v2"),
    GlobalStub("torch._utils", "_rebuild_tensor_v3"),
)

StatePath = tuple[str | int, ...]
"""Path of an entry in the nested state: keys of dictionaries and indices of lists."""


def read_dcp(folder: str | Path) -> dict[str, Any]:
    """Read the state in a DCP folder, nested as it was saved.

    Give its ``["model"]``, or the entry that has the weights there, to ``pipe.load_state_dict``.

    Args:
        folder: folder that ``torch.distributed.checkpoint.save`` wrote, from one process or several.

    Returns:
        Dictionaries and lists of tensors on the CPU, numbers, text and None.

    Raises:
        DataError: if the folder is not a DCP folder, is damaged, or has other values than these; names file and entry.
    """
    with DcpFolder(Path(folder)) as dcp:
        state = _Branch()
        for path, key in dcp.entries.items():
            _insert(state, path, dcp.value(key), dcp.path)
    return {str(key): _lists(value) for key, value in state.items()}


class _Branch(dict[str | int, Any]):
    """A node of the nested state; a plain dict is an entry's value."""


class DcpFolder:
    """A DCP folder, open for reading; a context manager.

    Attributes:
        path: path of the folder.
        entries: name of each entry, by its path in the nested state.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None
        self._file_name = ""
        where = path / ".metadata"
        try:
            metadata = parse(read_bytes(where, _MAX_METADATA), where)
        except FileNotFoundError as error:
            raise DataError(
                f"{path} is not a folder of torch.distributed.checkpoint: no .metadata"
            ) from error
        except OSError as error:
            raise DataError(f"cannot read {where}: {error.strerror}") from error
        try:
            fields = _state(metadata, "Metadata")
            self._metadata = _stubs_by_name(fields["state_dict_metadata"])
            paths = fields.get("planner_data") or {}
            self.entries = {_state_path(paths.get(key, (key,))): key for key in self._metadata}
            if len(self.entries) != len(self._metadata):
                raise ValueError("two entries have the same path")
            self._chunks = _chunk_places(fields["storage_data"])
        except _MALFORMED as error:
            raise DataError(
                f"{where} does not describe a checkpoint: {type(error).__name__}: {error}"
            ) from error

    def __enter__(self) -> DcpFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def value(self, key: str) -> Any:
        """Return an entry's tensor, assembled from its chunks, or its other value.

        Raises:
            DataError: if the entry cannot be read, or the folder contradicts itself about it.
        """
        metadata = self._metadata[key]
        try:
            if metadata.factory is not None and metadata.factory.name == "BytesStorageMetadata":
                return _PlainValues().convert(self._archive(key, ()).root)
            return self._tensor(key, _state(metadata, "TensorStorageMetadata"))
        except _MALFORMED as error:
            raise DataError(
                f"{self.path}: cannot read {key!r:.200}: {type(error).__name__}: {error}"
            ) from error
        except OSError as error:
            raise DataError(f"{self.path}: cannot read {key!r:.200}: {error.strerror or error}") from error

    def _tensor(self, key: str, metadata: Mapping[str, Any]) -> Tensor:
        dtype = _dtype(_state(metadata["properties"], "TensorProperties")[0])
        shape = _sizes(metadata["size"])
        chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in metadata["chunks"]]
        boxes = [(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in chunks]
        stored = sum(self._stored_bytes(key, offsets) for offsets, _ in boxes)
        if math.prod(shape) * dtype.itemsize > stored:  # before the memory is allocated
            raise ValueError(
                f"{list(shape)} of {dtype} are more than the {stored:,} bytes that are stored of it"
            )
        tensor, filled = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for offsets, sizes in boxes:
            chunk = self._archive(key, offsets).tensor()
            if chunk.shape != sizes or chunk.dtype != dtype:
                raise ValueError(f"a chunk of {list(sizes)} is {chunk.dtype} of {list(chunk.shape)}")
            if len(offsets) != len(shape) or any(
                o + n > m for o, n, m in zip(offsets, sizes, shape, strict=True)
            ):
                raise ValueError(f"a chunk of {list(sizes)} at {list(offsets)} is not within {list(shape)}")
            box = tuple(slice(first, first + count) for first, count in zip(offsets, sizes, strict=True))
            tensor[box], filled[box] = chunk, True
        if not filled.all():
            raise ValueError(f"its chunks have {int(filled.sum()):,} of {tensor.numel():,} numbers")
        return tensor

    def _stored_bytes(self, key: str, offsets: tuple[int, ...]) -> int:
        name, _, length = self._chunks[key, offsets]
        return min(length, (self.path / name).stat().st_size)

    def _archive(self, key: str, offsets: tuple[int, ...]) -> _Archive:
        name, start, length = self._chunks[key, offsets]
        if name != self._file_name:
            if self._file is not None:
                self._file.close()
            require_regular(self.path / name)
            self._file, self._file_name = (self.path / name).open("rb"), name
        size = os.fstat(self._file.fileno()).st_size
        if not 0 <= start <= start + length <= size:
            raise ValueError(f"{name} has {size:,} bytes, not those from {start:,} to {start + length:,}")
        self._file.seek(start)
        return _Archive(self._file.read(length), f"{name} at {start}")


def _chunk_places(storage_data: Any) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """Return file, first byte and length in bytes of each chunk, by its entry and offsets."""
    places = {}
    for index_stub, info_stub in storage_data.items():
        index, info = _state(index_stub, "MetadataIndex"), _state(info_stub, "_StorageInfo")
        entry, name = _text(index["fqn"]), _text(info["relative_path"])
        start, length = info["offset"], info["length"]
        if Path(name).name != name or name in (".", ".."):
            raise ValueError(f"{name!r:.200} is not a file of the folder")
        if type(start) is not int or type(length) is not int:
            raise TypeError(f"{name} has no place for {entry!r:.200}")
        if info.get("transform_descriptors"):
            raise ValueError(f"{name} is transformed, which cannot be undone here")
        places[entry, _sizes(index.get("offset") or ())] = (name, start, length)
    return places


class _Archive:
    """An archive of ``torch.save``: a zip with a pickle and the uncompressed bytes of storages."""

    def __init__(self, data: bytes, where: str) -> None:
        self._zip = zipfile.ZipFile(io.BytesIO(data))
        self._names = {name.partition("/")[2]: name for name in self._zip.namelist()}
        order = self._member("byteorder") if "byteorder" in self._names else b"little"
        if order != b"little":
            raise ValueError(f"its numbers are in the byte order {order!r:.20}")
        self.root = parse(self._member("data.pkl"), where)

    def _member(self, name: str) -> bytes:
        info = self._zip.getinfo(self._names[name])
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed")
        return self._zip.read(info)

    def tensor(self) -> Tensor:
        """Return the tensor that was saved."""
        stub = self.root
        if not isinstance(stub, ObjectStub) or stub.factory not in _REBUILD:
            raise TypeError(f"{_kind(stub)} instead of a tensor")
        storage, offset, size, stride, *_ = stub.args
        _, storage_class, name, *_ = storage.args[0]
        dtype = _dtype(stub.args[6]) if len(stub.args) > 6 else _storage_dtype(storage_class)
        numbers = torch.frombuffer(
            bytearray(self._member(f"data/{_text(name)}")) or bytearray(1), dtype=torch.uint8
        )
        shape, strides = _sizes(size), _sizes(stride)
        last = (
            offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
            if math.prod(shape)
            else -1
        )
        if type(offset) is not int or offset < 0 or (last + 1) * dtype.itemsize > numbers.numel():
            raise ValueError(
                f"{list(shape)} with strides {list(strides)} do not fit its {numbers.numel():,} bytes"
            )
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        flat = numbers[: numbers.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return flat.as_strided(shape, strides, offset)


def _dtype(stub: Any) -> torch.dtype:
    if not isinstance(stub, GlobalStub):
        raise TypeError(f"{_kind(stub)} instead of a dtype")
    return _DTYPES[stub]


def _storage_dtype(storage_class: Any) -> torch.dtype:
    """Return the dtype of ``torch.FloatStorage`` and the like."""
    name = {"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64", "Long": "int64",
            "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
            "ComplexFloat": "complex64"}[_text(storage_class.name).removesuffix("Storage")]  # fmt: skip
    return _DTYPES[GlobalStub("torch", name)]


class _PlainValues:
    """A conversion of stubs to plain values, bounded in their number and depth."""

    def __init__(self) -> None:
        self.count = 0

    def convert(self, value: Any, depth: int = 0) -> Any:
        self.count += 1
        if self.count > _MAX_VALUES or depth > _MAX_DEPTH:
            raise ValueError(f"it has more than {_MAX_VALUES:,} values, or is more than {_MAX_DEPTH} deep")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if type(value) in (list, tuple):
            return type(value)(self.convert(item, depth + 1) for item in value)
        if type(value) is dict:
            return {self.convert(k, depth + 1): self.convert(v, depth + 1) for k, v in value.items()}
        if isinstance(value, ObjectStub) and value.factory == _ORDERED_DICT and value.state is None:
            return self.convert(value.items, depth)
        if isinstance(value, ObjectStub) and value.factory == _SIZE:
            return _sizes(value)
        raise TypeError(f"{_kind(value)} is not a plain value")


def _kind(value: Any) -> str:
    stub = value.factory if isinstance(value, ObjectStub) else value
    return str(stub) if isinstance(stub, GlobalStub) else type(value).__name__


def _state(stub: Any, name: str) -> Any:
    """Return the state of a stub of one of DCP's own classes."""
    if not isinstance(stub, ObjectStub) or stub.factory is None or stub.factory.name != name:
        raise TypeError(f"{_kind(stub)} instead of {name}")
    return stub.state


def _text(value: Any) -> str:
    """Require text before it is hashed or printed: a few bytes can make tuples for which that takes forever."""
    if not isinstance(value, str):
        raise TypeError(f"{_kind(value)} instead of text")
    return value


def _stubs_by_name(table: Any) -> dict[str, ObjectStub]:
    if type(table) is not dict or not all(isinstance(key, str) for key in table):
        raise TypeError("entries have no names")
    return table


def _sizes(value: Any) -> tuple[int, ...]:
    """Return a ``torch.Size``, or a tuple or list of sizes, offsets or strides, as a tuple."""
    sizes = value.args[0] if isinstance(value, ObjectStub) and value.factory == _SIZE else value
    if not isinstance(sizes, tuple | list) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in sizes):
        raise TypeError(f"{_kind(value)} instead of sizes")
    return tuple(sizes)


def _state_path(path: Any) -> StatePath:
    if not isinstance(path, tuple) or not path or any(type(key) not in (str, int) for key in path):
        raise TypeError(f"{_kind(path)} is not a path in a state")
    return path


def _insert(state: _Branch, path: StatePath, value: Any, where: Path) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, _Branch())
        if not isinstance(state, _Branch):
            raise DataError(f"{where}: {path!r:.200} lies within another entry's value")
    if path[-1] in state:
        raise DataError(f"{where}: {path!r:.200} appears twice")
    state[path[-1]] = value


def _lists(state: Any) -> Any:
    """Replace branches by lists where all keys are numbers, and by dictionaries otherwise."""
    if not isinstance(state, _Branch):
        return state
    values = {key: _lists(value) for key, value in state.items()}
    if all(isinstance(key, int) for key in values):
        return [values[key] for key in sorted(values)]
    return values
