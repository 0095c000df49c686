"""A config's way in and out: a TOML file, ``a.b=c`` overrides, and the TOML a run folder keeps.

The standard library reads TOML and does not write it; sections of numbers and strings are all that is needed here.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.bounded_io import MEGABYTE, read_bytes
from penstock.errors import ConfigError
from penstock.train.config.config import Config, from_mapping

_MOST = 4 * MEGABYTE


def load(path: Path | None, overrides: Iterable[str] = ()) -> Config:
    """Read a config file, put the overrides over it, and check the result.

    Args:
        path: a TOML file; None for the defaults.
        overrides: ``section.key=value``, the value as TOML writes it; text may go without quotes.

    Raises:
        ConfigError: an unreadable file, a malformed override, or what `from_mapping` refuses.
    """
    tables = {} if path is None else _read(path)
    for override in overrides:
        section, key, value = _split(override)
        table = tables.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{section} is a section with keys of its own, not {table!r}")
        table[key] = value
    return from_mapping(tables)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bytes(path, _MOST, pipes=True).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise ConfigError(f"{path} is no TOML file: {error}") from error


def _split(override: str) -> tuple[str, str, Any]:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"an override is section.key=value, as in train.steps=100; not {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return section, key, text
    # A line break in the text could smuggle in more than one value.
    return section, key, value["value"] if len(value) == 1 else text


def dump(config: Config) -> str:
    """The config as TOML that `load` reads back as the same config; what is not set is left out."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        values = dataclasses.asdict(getattr(config, section.name))
        if section.name == "model":
            # A Hugging Face model has its sizes from elsewhere.
            values = {k: v for k in ("path", "config") if (v := values.pop(k))} or values
        for key, value in values.items():
            if value is not None:
                lines.append(f"{key} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: int | float | str) -> str:
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped and JSON leaves.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
