"""Every key of the config with its default, allowed values and meaning, from the sections' types and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from penstock.base.errors import ConfigError
from penstock.train.config.config import Config, nearest_key

_ENTRY = re.compile(r"    (\w+(?:, \w+)*): (.*)")
_LIMIT = 2**31 - 1
"""Bounds at or above this come from the file format, and go without saying."""
_HEAD = """# Keys of the config

`penstock config --markdown` prints this page; `penstock config optim.lr` prints one key, and `penstock config optim` one
section. A config is a TOML file, `penstock train my.toml`. On the command line a key is `section.key=value`, as in
`penstock train train.steps=100 optim.lr=1e-4`, with or without `--set` before it. `penstock train --print-config` prints the
config of a run with all its defaults. [training.md](training.md) shows how the keys are used together.
"""


@dataclass(frozen=True)
class ConfigKey:
    section: str
    key: str
    default: str
    allowed: str
    meaning: str


def config_keys() -> dict[str, tuple[str, list[ConfigKey]]]:
    """Return the description and the keys of every section, by its name."""
    sections = {}
    for section, table in vars(Config()).items():
        kind = type(table)
        text, meanings = _documented(kind)
        properties = TypeAdapter(kind).json_schema()["properties"]
        keys = [
            ConfigKey(
                section,
                field.name,
                _toml(getattr(table, field.name)),
                _allowed(properties[field.name]),
                meanings[field.name],
            )
            for field in dataclasses.fields(kind)
        ]
        sections[section] = text, keys
    return sections


def keys_page() -> str:
    """Return the page of all keys as Markdown."""
    parts = [_HEAD]
    for section, (text, keys) in config_keys().items():
        rows = [
            f"| `{key.key}` | {f'`{key.default}`' if key.default else ''} | {key.allowed} | {key.meaning} |"
            for key in keys
        ]
        table = "\n".join(["| key | default | allowed | meaning |", "|---|---|---|---|", *rows])
        parts.append(f"## `[{section}]`\n\n{text}\n\n{table}\n")
    return "\n".join(parts)


def keys_text(names: Sequence[str]) -> str:
    sections = config_keys()
    everything = [key for _, keys in sections.values() for key in keys]
    chosen: list[ConfigKey] = [] if names else everything
    for name in names:
        matching = [key for key in everything if name in (key.section, f"{key.section}.{key.key}")]
        if not matching:
            raise ConfigError(f"no key {name}{nearest_key(name)}; the sections are {', '.join(sections)}")
        chosen += matching
    return "\n".join(
        f"{key.section}.{key.key}{f' = {key.default}' if key.default else ''}\n"
        f"    {key.allowed.replace('`', '')}\n    {key.meaning.replace('`', '')}\n"
        for key in chosen
    )


def _documented(kind: type) -> tuple[str, dict[str, str]]:
    """Return the description of a section, and the meaning of each key."""
    head, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in attributes.splitlines():
        if entry := _ENTRY.fullmatch(line):
            names = entry[1].split(", ")
            meanings |= dict.fromkeys(names, entry[2])
        else:
            meanings |= {name: f"{meanings[name]} {line.strip()}".strip() for name in names}
    text = head.partition(": ")[2].strip()
    return _markdown(text[:1].upper() + text[1:]), {name: _markdown(m) for name, m in meanings.items()}


def _markdown(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def _toml(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict | list):
        return str(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _allowed(schema: dict[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(_allowed(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f'`"{value}"`' for value in schema.get("enum") or [schema["const"]])
    kind = "object" if "$ref" in schema else schema.get("type")
    if kind in ("integer", "number"):
        return _range("whole number" if kind == "integer" else "number", schema)
    if kind == "array":
        return f"list of: {_allowed(schema['items'])}"
    return {"boolean": "`true` or `false`", "object": "table", "string": "text"}[str(kind)]


def _range(noun: str, schema: dict[str, Any]) -> str:
    limits = [
        f"{word} {schema[name]:g}"
        for name, word in (
            ("minimum", "at least"), ("exclusiveMinimum", "above"),
            ("maximum", "at most"), ("exclusiveMaximum", "below"),
        )
        if name in schema and schema[name] < _LIMIT
    ]  # fmt: skip
    return f"{noun} {', '.join(limits)}" if limits else noun
