"""What a checkpoint says of itself: its files with their digests, its tensors, and the run's values that are no tensors.

A checkpoint is a folder with safetensors files and a ``manifest.json``. The manifest is written last, and its first line
is the SHA-256 digest of all that follows it, so a folder with a sound manifest was complete, and what has changed since
then is found: in the manifest by its own digest, in the files by those it holds.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.bounded_io import parse_json
from penstock.encoding import sendable
from penstock.errors import DataError
from penstock.tensor_file import DTYPES, StoredFile

MANIFEST = "manifest.json"
VERSION = 1

_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_FILE_NAME = re.compile(r"[a-z]+-\d{5,}-of-\d{5,}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@sendable
@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, by the same name there.

    Attributes:
        file: its name in the folder.
        shape: of the whole tensor, however it was cut while training.
        dtype: as safetensors writes it.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str


@sendable
@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint is but the tensors' numbers.

    Attributes:
        step: training steps done; the next one to be done, and with it the position in the data.
        seed: of the random numbers in layers.
        layers: names in the whole model, by stage.
        layout: how the run was spread when it was written; nobody needs it for loading.
        files: by name.
        tensors: by name: ``model/NAME``, ``optimizer/KEY/NAME``, ``main/NAME`` and ``generators/RANK/DEVICE``.
        values: what is no tensor, as `penstock.checkpoint.format.json_values` writes it.
        config: of the run.
        config_sha256: of the config as JSON.
        versions: of what wrote it, by package.
    """

    step: int
    seed: int
    layers: tuple[tuple[str, ...], ...]
    layout: dict[str, Any]
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    values: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    config_sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of all files of tensors."""
        return sum(file.bytes for file in self.files.values())


def digest_of_config(config: dict[str, Any]) -> str:
    """SHA-256 of a config as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def dump(manifest: Manifest) -> bytes:
    """The manifest as its file holds it."""
    table = {"format": "penstock checkpoint", "version": VERSION, **asdict(manifest)}
    rest = json.dumps(table, indent=1, allow_nan=False)[1:].lstrip().encode() + b"\n"
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def parse(data: bytes, where: object) -> Manifest:
    """Read a manifest and check every part of it.

    Args:
        data: the file's bytes.
        where: its path, for the message.

    Raises:
        DataError: it is damaged, or no manifest that this version knows; says what is wrong.
    """
    first = _FIRST_LINE.match(data)
    if first is None:
        raise DataError(f"{where} is no manifest of a checkpoint: its first line is not its digest")
    if hashlib.sha256(data[first.end() :]).hexdigest().encode() != first[1]:
        raise DataError(f"{where} is damaged: its SHA-256 digest is not the one in its first line")
    try:
        table = parse_json(data)
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    if not isinstance(table, dict) or table.get("format") != "penstock checkpoint":
        raise DataError(f"{where} is not the manifest of a checkpoint")
    if table.get("version") != VERSION:
        raise DataError(
            f"{where} has version {table.get('version')!r}; this Penstock reads version {VERSION}"
        )
    wrong = _Wrong(where)
    files = {
        name: _file(wrong, name, entry) for name, entry in wrong.take(table, "files", dict).items()
    }  # fmt: skip
    tensors = {
        name: _tensor(wrong, name, entry, files) for name, entry in wrong.take(table, "tensors", dict).items()
    }
    config = wrong.take(table, "config", dict)
    found = Manifest(
        step=wrong.count(table, "step"),
        seed=wrong.count(table, "seed"),
        layers=_layers(wrong, wrong.take(table, "layers", list)),
        layout=wrong.take(table, "layout", dict),
        files=files,
        tensors=tensors,
        values=wrong.take(table, "values", dict),
        config=config,
        config_sha256=wrong.take(table, "config_sha256", str),
        versions=wrong.take(table, "versions", dict),
    )
    if found.config_sha256 != digest_of_config(config):
        raise wrong(f"config_sha256 is {found.config_sha256!r}, which is not that of its config")
    return found


class _Wrong:
    """Makes the errors of one manifest."""

    def __init__(self, where: object) -> None:
        self.where = where

    def __call__(self, what: str) -> DataError:
        return DataError(f"{self.where}: {what}")

    def take(self, table: dict[str, Any], key: str, kind: type) -> Any:
        if not isinstance(table.get(key), kind):
            raise self(f"{key!r} must be a {kind.__name__}, not {table.get(key)!r:.80}")
        return table[key]

    def count(self, table: dict[str, Any], key: str) -> int:
        value = table.get(key)
        if type(value) is not int or value < 0:
            raise self(f"{key!r} must be a whole number of at least 0, not {value!r:.80}")
        return value


def _file(wrong: _Wrong, name: str, entry: Any) -> StoredFile:
    if not _FILE_NAME.fullmatch(name):
        raise wrong(f"{name!r:.80} is not how a file of a checkpoint is called")
    if not isinstance(entry, dict) or not _SHA256.fullmatch(str(entry.get("sha256"))):
        raise wrong(f"{name} has no SHA-256 digest")
    return StoredFile(wrong.count(entry, "bytes"), entry["sha256"])


def _tensor(wrong: _Wrong, name: str, entry: Any, files: dict[str, StoredFile]) -> StoredTensor:
    if not isinstance(entry, dict) or entry.get("file") not in list(files):
        raise wrong(f"tensor {name!r:.200} is in no file of the checkpoint")
    shape = entry.get("shape")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise wrong(f"tensor {name!r:.200} has a shape of {shape!r:.80}")
    if entry.get("dtype") not in list(DTYPES):
        raise wrong(f"tensor {name!r:.200} is of dtype {entry.get('dtype')!r:.80}")
    return StoredTensor(entry["file"], tuple(shape), entry["dtype"])


def _layers(wrong: _Wrong, stages: list[Any]) -> tuple[tuple[str, ...], ...]:
    for names in stages:
        if not isinstance(names, list) or any(not isinstance(name, str) for name in names):
            raise wrong(f"'layers' must be a list of names for every stage, not {names!r:.80}")
    return tuple(tuple(names) for names in stages)
