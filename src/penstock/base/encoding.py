"""Encoding of values as bytes for other processes: numbers, text, containers, tensors, arrays, and registered records.

Decoding cannot run code. The first eight bytes are the length of a JSON text, which is the value with a tag before the
parts of each type that JSON lacks; behind it are the tensors' and arrays' bytes, each at a multiple of 64.

    None, bool, int, float, str             as in JSON; NaN and infinities are NaN, Infinity, -Infinity
    ["list", ...], ["tuple", ...], ["set", ...], ["dict", key, value, key, value, ...], ["path", text]
    ["tensor", dtype, shape, offset, bytes], ["array", dtype, shape, offset, bytes], ["bytes", offset, bytes]
    ["record", name, field, field, ...]     a type marked with `sendable`, by its name
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.base.errors import TransportError

C = TypeVar("C", bound=type)

_LENGTH = struct.Struct("<Q")
_ALIGN = 64
_KINDS = "biufc"  # numpy's dtypes of numbers, which are nothing but their bytes
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_RECORDS: dict[str, type] = {}


def sendable(kind: C) -> C:
    """Register a NamedTuple or a dataclass for sending to other processes; also a decorator.

    The receiver calls the type with the fields in their order.
    """
    assert hasattr(kind, "_fields") or dataclasses.is_dataclass(kind), kind
    _RECORDS[_name_of(kind)] = kind
    return kind


def encode(value: object) -> bytes:
    """Encode a value as bytes.

    Subclasses of int, float, str, dict and the like arrive as their base class, and tensors on the CPU, without their graph.
    """
    bodies = _Bodies()
    text = json.dumps(_tagged(value, bodies), separators=(",", ":")).encode()
    # JSON may end with blanks: they fill it up to where the first tensor begins.
    start = -(_LENGTH.size + len(text)) % _ALIGN
    return b"".join((_LENGTH.pack(len(text) + start), text, b" " * start, *bodies.chunks))


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decode the bytes that `encode` made."""
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        end = _LENGTH.size + length
        if end > len(view):
            raise ValueError(f"it has {len(view)} bytes, not {end}")
        return _value(json.loads(bytes(view[_LENGTH.size : end])), view[end:])
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
        RuntimeError,
        struct.error,
    ) as error:
        raise TransportError(f"what another process sent cannot be read: {error}") from error


class _Bodies:
    """Bytes behind the JSON text."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self._size = 0

    def add(self, body: Any, size: int) -> tuple[int, int]:
        """Append bytes, and return their offset and number."""
        offset, fill = self._size, -size % _ALIGN
        self.chunks += [body, bytes(fill)]
        self._size += size + fill
        return offset, size


def _tagged(value: Any, bodies: _Bodies) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if hasattr(type(value), "_fields") or dataclasses.is_dataclass(value):
        return _record(value, bodies)
    for tag, kind in (("list", list), ("tuple", tuple), ("set", set)):
        if isinstance(value, kind):
            return [tag, *(_tagged(one, bodies) for one in value)]
    if isinstance(value, Mapping):
        return ["dict", *(_tagged(one, bodies) for item in value.items() for one in item)]
    if isinstance(value, Path):
        return ["path", str(value)]
    if isinstance(value, bytes):
        return ["bytes", *bodies.add(value, len(value))]
    if isinstance(value, np.generic):
        return _tagged(value.item(), bodies)
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        array = np.ascontiguousarray(value)
        return ["array", array.dtype.str, list(value.shape), *bodies.add(array.tobytes(), array.nbytes)]
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        name = str(value.dtype).removeprefix("torch.")
        return ["tensor", name, list(value.shape), *bodies.add(flat.numpy().data, len(flat))]
    raise TypeError(f"a {type(value).__qualname__} cannot be sent to other processes")


def _record(value: Any, bodies: _Bodies) -> list[Any]:
    name = _name_of(type(value))
    if name not in _RECORDS:
        raise TypeError(
            f"a {name} cannot be sent to other processes; mark it with penstock.base.encoding.sendable"
        )
    return ["record", name, *(_tagged(getattr(value, field), bodies) for field in _fields(type(value)))]


def _value(tagged: Any, bodies: memoryview) -> Any:
    if isinstance(tagged, dict):
        raise TypeError("an object, which no value is")
    if not isinstance(tagged, list):
        return tagged
    tag, *parts = tagged
    match tag:
        case "list":
            return [_value(one, bodies) for one in parts]
        case "tuple":
            return tuple(_value(one, bodies) for one in parts)
        case "set":
            return {_value(one, bodies) for one in parts}
        case "dict":
            values = [_value(one, bodies) for one in parts]
            return dict(zip(values[::2], values[1::2], strict=True))
        case "path":
            return Path(parts[0])
        case "bytes":
            return bytes(_body(bodies, *parts))
        case "array":
            name, shape, *place = parts
            dtype = np.dtype(_text(name))
            if dtype.kind not in _KINDS:
                raise ValueError(f"an array of {name}")
            return np.frombuffer(bytearray(_body(bodies, *place)), dtype).reshape(_shape(shape))
        case "tensor":
            name, shape, *place = parts
            return _tensor(_DTYPES[name], _shape(shape), _body(bodies, *place))
        case "record":
            name, *values = parts
            kind = _RECORDS[name]
            if len(values) != len(_fields(kind)):
                raise ValueError(f"a {name} of {len(values)} fields")
            fields = {name: _value(one, bodies) for name, one in zip(_fields(kind), values, strict=True)}
            return kind(**fields)
    raise ValueError(f"the tag {tag!r:.40}")


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], body: memoryview) -> Tensor:
    if len(body) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(body)} bytes for a tensor of {dtype} and shape {shape}")
    if not body:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(dtype).view(shape)


def _body(bodies: memoryview, offset: int, size: int) -> memoryview:
    if not (type(offset) is int and type(size) is int and 0 <= offset <= offset + size <= len(bodies)):
        raise ValueError(f"bytes {offset!r:.40} to {size!r:.40} more, of {len(bodies)}")
    return bodies[offset : offset + size]


def _shape(shape: Any) -> tuple[int, ...]:
    if not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)):
        raise ValueError(f"the shape {shape!r:.40}")
    return tuple(shape)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} in place of text")
    return value


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _fields(kind: Any) -> tuple[str, ...]:
    fields: tuple[str, ...] | None = getattr(kind, "_fields", None)
    return fields if fields is not None else tuple(field.name for field in dataclasses.fields(kind))
