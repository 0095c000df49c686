"""Folders of ``torch.distributed.checkpoint`` (DCP), read without unpickling anything.

Such a folder has a ``.metadata``, a pickle that says of every entry which chunks it has and where they lie, and ``.distcp``
files with the chunks, each an archive as ``torch.save`` writes it: a zip with a pickle and the numbers. The pickles' opcodes
are read as data (`penstock.checkpoint.dcp.opcodes`), so a folder made with ill intent cannot run code.
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
from penstock.checkpoint.dcp.opcodes import Made, Named, parse
from penstock.errors import DataError
from penstock.tensor_file import DTYPES

_MOST = 512 * MEGABYTE  # of .metadata
_VALUES = 1_000_000  # in one entry that is no tensor
_DEPTH = 100
_DTYPES = {Named("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES}
_DAMAGED = (
    LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, EOFError, MemoryError,
    struct.error, zipfile.BadZipFile,
)  # fmt: skip
"""What is raised at notes that do not say what they should, and by zipfile at an archive that is none."""
_ORDERED = Named("collections", "OrderedDict")
_SIZE = Named("torch", "Size")
_REBUILD = (Named("torch._utils", "_rebuild_tensor_v2"), Named("torch._utils", "_rebuild_tensor_v3"))

Place = tuple[str | int, ...]
"""Where an entry is in the nested state: keys of dictionaries and places in lists."""


def read_dcp(folder: str | Path) -> dict[str, Any]:
    """The state that a DCP folder holds, nested as it was saved.

    Give ``["model"]`` of it (or what it is called there) to ``pipe.load_state_dict``.

    Args:
        folder: written by ``torch.distributed.checkpoint.save``, by one process or several.

    Returns:
        Dictionaries and lists of tensors on the CPU, numbers, text and None.

    Raises:
        DataError: it is none, is damaged, or holds something else than such values; names file and entry.
    """
    with Folder(Path(folder)) as found:
        state = _Branch()
        for path, key in found.entries.items():
            _put(state, path, found.value(key), found.path)
    return {str(key): _lists(value) for key, value in state.items()}


class _Branch(dict[str | int, Any]):
    """Of a nested state; values of the entries themselves may be dictionaries, too."""


class Folder:
    """A DCP folder; closes its files.

    Attributes:
        path: of the folder.
        entries: by place in the nested state, the entry's own name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None
        self._open = ""
        where = path / ".metadata"
        try:
            metadata = parse(read_bytes(where, _MOST), where)
        except FileNotFoundError as error:
            raise DataError(f"{path} is no folder of torch.distributed.checkpoint: no .metadata") from error
        except OSError as error:
            raise DataError(f"cannot read {where}: {error.strerror}") from error
        try:
            self._described: dict[str, Made] = _plain_keys(
                _state(metadata, "Metadata")["state_dict_metadata"]
            )
            paths = _state(metadata, "Metadata").get("planner_data") or {}
            self.entries = {_place(paths.get(key, (key,))): key for key in self._described}
            if len(self.entries) != len(self._described):
                raise ValueError("two entries have one place")
            self._stored = self._chunks(_state(metadata, "Metadata")["storage_data"])
        except _DAMAGED as error:
            raise DataError(
                f"{where} does not describe a checkpoint: {type(error).__name__}: {error}"
            ) from error

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def value(self, key: str) -> Any:
        """An entry's tensor, put together from its chunks, or its other value.

        Raises:
            DataError: it cannot be read, or the folder says two things of it.
        """
        described = self._described[key]
        try:
            if described.what is not None and described.what.name == "BytesStorageMetadata":
                return _Values().plain(self._archive(key, ()).root)
            return self._tensor(key, _state(described, "TensorStorageMetadata"))
        except _DAMAGED as error:
            raise DataError(
                f"{self.path}: cannot read {key!r:.200}: {type(error).__name__}: {error}"
            ) from error
        except OSError as error:
            raise DataError(f"{self.path}: cannot read {key!r:.200}: {error.strerror or error}") from error

    def _tensor(self, key: str, described: Mapping[str, Any]) -> Tensor:
        dtype = _dtype(_state(described["properties"], "TensorProperties")[0])
        shape = _sizes(described["size"])
        chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in described["chunks"]]
        boxes = [(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in chunks]
        held = sum(self._length(key, offsets) for offsets, _ in boxes)
        if math.prod(shape) * dtype.itemsize > held:
            raise ValueError(
                f"{list(shape)} of {dtype} are more than the {held:,} bytes that are stored of it"
            )
        whole, filled = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for offsets, sizes in boxes:
            part = self._archive(key, offsets).tensor()
            if part.shape != sizes or part.dtype != dtype:
                raise ValueError(f"a chunk of {list(sizes)} is {part.dtype} of {list(part.shape)}")
            if len(offsets) != len(shape) or any(
                o + n > m for o, n, m in zip(offsets, sizes, shape, strict=True)
            ):
                raise ValueError(f"a chunk of {list(sizes)} at {list(offsets)} is not within {list(shape)}")
            box = tuple(slice(first, first + count) for first, count in zip(offsets, sizes, strict=True))
            whole[box], filled[box] = part, True
        if not filled.all():
            raise ValueError(f"its chunks have {int(filled.sum()):,} of {whole.numel():,} numbers")
        return whole

    def _length(self, key: str, offsets: tuple[int, ...]) -> int:
        name, _, length = self._stored[key, offsets]
        return min(length, (self.path / name).stat().st_size)

    def _archive(self, key: str, offsets: tuple[int, ...]) -> _Archive:
        name, offset, length = self._stored[key, offsets]
        if name != self._open:
            if self._file is not None:
                self._file.close()
            require_regular(self.path / name)
            self._file, self._open = (self.path / name).open("rb"), name
        size = os.fstat(self._file.fileno()).st_size
        if not 0 <= offset <= offset + length <= size:
            raise ValueError(f"{name} has {size:,} bytes, not those from {offset:,} to {offset + length:,}")
        self._file.seek(offset)
        return _Archive(self._file.read(length), f"{name} at {offset}")

    def _chunks(self, stored: Any) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
        """By entry and offsets: file, first byte and bytes."""
        found = {}
        for index, info in stored.items():
            at, place = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
            entry, name = _text(at["fqn"]), _text(place["relative_path"])
            offset, length = place["offset"], place["length"]
            if Path(name).name != name or name in (".", ".."):
                raise ValueError(f"{name!r:.200} is no file of the folder")
            if type(offset) is not int or type(length) is not int:
                raise TypeError(f"{name} has no place for {entry!r:.200}")
            if place.get("transform_descriptors"):
                raise ValueError(f"{name} is transformed, which nothing here undoes")
            found[entry, _sizes(at.get("offset") or ())] = (name, offset, length)
        return found


class _Archive:
    """What ``torch.save`` wrote: a zip with a pickle and, stored as they are, the numbers of storages."""

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
        """The tensor that it is of."""
        made = self.root
        if not isinstance(made, Made) or made.what not in _REBUILD:
            raise TypeError(f"{_kind(made)} instead of a tensor")
        storage, offset, size, stride, *_ = made.args
        _, kind, name, *_ = storage.args[0]
        dtype = _dtype(made.args[6]) if len(made.args) > 6 else _dtype_of(kind)
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


def _dtype(named: Any) -> torch.dtype:
    """Of a note of ``torch.float32`` and the like."""
    if not isinstance(named, Named):
        raise TypeError(f"{_kind(named)} instead of a dtype")
    return _DTYPES[named]


def _dtype_of(kind: Any) -> torch.dtype:
    """Of ``torch.FloatStorage`` and the like."""
    name = {"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64", "Long": "int64",
            "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
            "ComplexFloat": "complex64"}[_text(kind.name).removesuffix("Storage")]  # fmt: skip
    found: torch.dtype = getattr(torch, name)
    return found


class _Values:
    """Turns notes into plain values, so many and so deep."""

    def __init__(self) -> None:
        self.count = 0

    def plain(self, value: Any, depth: int = 0) -> Any:
        self.count += 1
        if self.count > _VALUES or depth > _DEPTH:
            raise ValueError(f"it has more than {_VALUES:,} values, or is more than {_DEPTH} deep")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if type(value) in (list, tuple):
            return type(value)(self.plain(item, depth + 1) for item in value)
        if type(value) is dict:
            return {self.plain(k, depth + 1): self.plain(v, depth + 1) for k, v in value.items()}
        if isinstance(value, Made) and value.what == _ORDERED and value.state is None:
            return self.plain(value.items, depth)
        if isinstance(value, Made) and value.what == _SIZE:
            return _sizes(value)
        raise TypeError(f"{_kind(value)} is no plain value")


def _kind(value: Any) -> str:
    what = value.what if isinstance(value, Made) else value if isinstance(value, Named) else None
    return str(what) if what is not None else type(value).__name__


def _state(made: Any, name: str) -> Any:
    """What an object of DCP's own was given."""
    if not isinstance(made, Made) or made.what is None or made.what.name != name:
        raise TypeError(f"{_kind(made)} instead of {name}")
    return made.state


def _text(value: Any) -> str:
    """Text, before anything is done with it: few bytes can make tuples that take for ever to hash or to print."""
    if not isinstance(value, str):
        raise TypeError(f"{_kind(value)} instead of text")
    return value


def _plain_keys(table: Any) -> dict[str, Made]:
    if type(table) is not dict or not all(isinstance(key, str) for key in table):
        raise TypeError("entries have no names")
    return table


def _sizes(value: Any) -> tuple[int, ...]:
    """A ``torch.Size``, or a tuple of sizes, offsets or strides."""
    found = value.args[0] if isinstance(value, Made) and value.what == _SIZE else value
    if not isinstance(found, tuple | list) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in found):
        raise TypeError(f"{_kind(value)} instead of sizes")
    return tuple(found)


def _place(path: Any) -> Place:
    if not isinstance(path, tuple) or not path or any(type(part) not in (str, int) for part in path):
        raise TypeError(f"{_kind(path)} is no place in a state")
    return path


def _put(state: _Branch, path: Place, value: Any, where: Path) -> None:
    for part in path[:-1]:
        state = state.setdefault(part, _Branch())
        if not isinstance(state, _Branch):
            raise DataError(f"{where}: {path!r:.200} lies within something else")
    if path[-1] in state:
        raise DataError(f"{where}: {path!r:.200} is there twice")
    state[path[-1]] = value


def _lists(state: Any) -> Any:
    """Branches as what they were: lists where all keys are numbers, dictionaries otherwise."""
    if not isinstance(state, _Branch):
        return state
    found = {key: _lists(value) for key, value in state.items()}
    if all(isinstance(key, int) for key in found):
        return [found[key] for key in sorted(found)]
    return found
