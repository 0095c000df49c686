"""Manifest of a checkpoint: its files with their digests, its tensors, and the run's values that are no tensors.

A checkpoint is a folder with safetensors files and a ``manifest.json``. The manifest is written last, and its first line
is the SHA-256 digest of the rest. So a folder with a sound manifest was complete, and later changes are detected: in the
manifest by its own digest, in the files by the digests in it.

Values of states of optimizers and schedules are encoded as JSON. It has no tuples, no NaN and only text as keys, so these
are written as objects with one key that begins with ``$``. A tensor becomes ``{"$tensor": NAME}`` and is stored in a file.
Decoding gives only plain values, whatever the JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from torch import Tensor

from penstock.base.bounded_io import parse_json
from penstock.base.encoding import sendable
from penstock.base.errors import ConfigError, DataError
from penstock.base.tables import NotNegative, explain
from penstock.base.tensor_file import DTYPES, StoredFile

MANIFEST = "manifest.json"
VERSION = 1

_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_FileName = Annotated[str, Field(pattern=r"\A[a-z]+-\d{5,}-of-\d{5,}\.safetensors\z")]
_NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"be one of {', '.join(DTYPES)}")
    return dtype


@sendable
@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, under the same name there; `shape` is the full tensor's, even if training sharded it."""

    file: str
    shape: tuple[NotNegative, ...]
    dtype: Annotated[str, AfterValidator(_known)]


@sendable
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything in a checkpoint except the numbers of its tensors.

    Attributes:
        step: number of training steps done, which is also the next step and the position in the data.
        layout: ranks, stages and mesh of the run; not needed for loading.
        tensors: tensors by name: ``model/NAME``, ``optimizer/KEY/NAME``, ``main/NAME`` and ``generators/RANK/DEVICE``.
    """

    step: NotNegative
    seed: NotNegative
    layers: tuple[tuple[str, ...], ...]
    layout: dict[str, Any]
    files: dict[_FileName, StoredFile]
    tensors: dict[str, StoredTensor]
    values: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    config_sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of all files of tensors, in bytes."""
        return sum(file.bytes for file in self.files.values())


_MANIFEST = TypeAdapter(Manifest)


def digest_of_config(config: dict[str, Any]) -> str:
    """Return the SHA-256 digest of a config as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def dump(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest's file."""
    table = {"format": "penstock checkpoint", "version": VERSION, **asdict(manifest)}
    rest = json.dumps(table, indent=1, allow_nan=False)[1:].lstrip().encode() + b"\n"
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def parse(data: bytes, where: object) -> Manifest:
    """Parse a manifest and check every part of it."""
    first = _FIRST_LINE.match(data)
    if first is None:
        raise DataError(f"{where} is not a manifest of a checkpoint: its first line is not its digest")
    if hashlib.sha256(data[first.end() :]).hexdigest().encode() != first[1]:
        raise DataError(f"{where} is damaged: its SHA-256 digest is not the one in its first line")
    try:
        table = parse_json(data)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(table, dict) or table.get("format") != "penstock checkpoint":
        raise DataError(f"{where} is not the manifest of a checkpoint")
    if table.get("version") != VERSION:
        raise DataError(
            f"{where} has version {table.get('version')!r}; this Penstock reads version {VERSION}"
        )
    try:
        manifest = _MANIFEST.validate_python(table)
    except ValidationError as error:
        raise DataError(f"{where}: {explain(error)}") from None
    for name, tensor in manifest.tensors.items():
        if tensor.file not in manifest.files:
            raise DataError(f"{where}: tensor {name!r:.200} is in no file of the checkpoint")
    if manifest.config_sha256 != digest_of_config(manifest.config):
        raise DataError(
            f"{where}: config_sha256 is {manifest.config_sha256!r:.80}, not the digest of its config"
        )
    return manifest


def encode_value(value: Any, name: str, put: Callable[[str, Tensor], None]) -> Any:
    """Encode a value for JSON; each tensor within it goes to `put`, with a name made of `name` and its place."""
    if isinstance(value, Tensor):
        put(name, value)
        return {"$tensor": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(float(value))}
    # Before the numbers: a bool is an int, and would become one.
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        # Of subclasses, as NumPy's float64 is, the plain number.
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, tuple | list):
        items = [encode_value(item, f"{name}/{n}", put) for n, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        pairs = [
            [encode_value(key, f"{name}/key", put), encode_value(item, f"{name}/{key}", put)]
            for key, item in value.items()
        ]
        if isinstance(value, Counter):
            return {"$counter": pairs}
        if any(not isinstance(key, str) or key.startswith("$") for key in value):
            return {"$dict": pairs}
        return dict(pairs)
    raise ConfigError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot keep; it keeps numbers, text, None, lists, "
        "tuples, dictionaries and tensors, so that loading cannot run code"
    )


def decode_value(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Decode a value that `encode_value` made."""
    if isinstance(value, list):
        return [decode_value(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decode_value(item, read) for key, item in value.items()}
    inner = value[kind]
    if kind == "$tensor" and isinstance(inner, str):
        return read(inner)
    if kind == "$float" and isinstance(inner, str) and inner in _NONFINITE:
        return _NONFINITE[inner]
    if kind == "$tuple" and isinstance(inner, list):
        return tuple(decode_value(item, read) for item in inner)
    if kind in ("$dict", "$counter") and isinstance(inner, list):
        return _pairs(kind, inner, read)
    raise DataError(f"{value!r:.80} is not a value of a checkpoint")


def _pairs(kind: str, pairs: list[Any], read: Callable[[str], Tensor]) -> dict[Any, Any]:
    table: dict[Any, Any] = Counter() if kind == "$counter" else {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{pair!r:.80} is not a key with its value")
        key = decode_value(pair[0], read)
        if not isinstance(key, str | int | float | bool | None):
            raise DataError(f"{key!r:.80} is not a key of a checkpoint's dictionary")
        table[key] = decode_value(pair[1], read)
    return table
