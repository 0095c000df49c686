"""Configs as text: a TOML file, ``section.key=value`` overrides, and the TOML that a run folder keeps."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w

from penstock.base.bounded_io import MEGABYTE, read_bytes
from penstock.base.errors import ConfigError
from penstock.train.config.config import Config, from_mapping, nearest_key

_MAX_BYTES = 4 * MEGABYTE


def load(path: Path | None, overrides: Iterable[str] = ()) -> Config:
    """Read a config file, apply the overrides, and check the result.

    Args:
        overrides: entries ``section.key=value``, the value as in TOML; the quotes of text may be left out.
    """
    tables = {} if path is None else _read(path)
    for override in overrides:
        (*sections, key), value = _split(override)
        table: Any = tables
        for section in sections:
            table = table.setdefault(section, {}) if isinstance(table, dict) else None
        if isinstance(table, dict):  # else `from_mapping` raises
            table[key] = value
    return from_mapping(tables)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bytes(path, _MAX_BYTES, pipes=True).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def _split(override: str) -> tuple[list[str], Any]:
    """Return the names of an override, section first, and its value."""
    name, equals, text = override.partition("=")
    name = name.strip()
    names = name.split(".")
    if not (equals and len(names) > 1 and all(names) and name.isprintable()):
        raise ConfigError(
            f"an override must be section.key=value, as in train.steps=100, got {override!r}{nearest_key(name)}"
        )
    try:
        tables = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return names, text
    # A line break in the text could smuggle in further keys.
    return names, tables["value"] if len(tables) == 1 else text


def dump(config: Config) -> str:
    """Return the config as TOML that `load` reads back as an equal config; unset keys are left out."""
    tables = _without_unset(asdict(config))
    if config.train.epochs:
        del tables["train"]["steps"]
    if config.data.held_out_path:
        del tables["data"]["held_out"]
    # The sizes of a Hugging Face model are in its own config.
    sizes = tables["model"]
    tables["model"] = {key: path for key in ("path", "config") if (path := sizes.pop(key))} or sizes
    return tomli_w.dumps({section: table for section, table in tables.items() if table})


def _without_unset(value: Any) -> Any:
    """Return nested tables without their keys that are None, which TOML cannot write."""
    if isinstance(value, dict):
        return {key: _without_unset(inner) for key, inner in value.items() if inner is not None}
    return [_without_unset(inner) for inner in value] if isinstance(value, list | tuple) else value
