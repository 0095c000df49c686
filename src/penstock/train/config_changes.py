"""Differences between the configs of a checkpoint and of the run that resumes from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.train.config.config import Config
from penstock.train.config.sections.data_section import SourceConfig
from penstock.train.config.sections.lora_section import LoraSection

_NUMERIC_KEYS = {"train": ("seed", "batch", "accumulate", "reduction"), "runtime": ("precision",)}
"""Keys that change the numbers; so do all of ``[model]``, ``[lora]``, ``[optim]`` and ``[data]`` but `_OTHER_KEYS`."""
_OTHER_KEYS = (("data", "changed"), ("data", "cache"), ("lora", "save"))
_PATHS = ("path", "held_out_path")


def config_changes(before: dict[str, Any], config: Config, *, knows_data: bool) -> list[str]:
    """Return the keys that change a run's numbers and differ from a checkpoint's config, a phrase each.

    Args:
        knows_data: whether the checkpoint has a digest of its data. The data may then have moved: the digest tells whether
            it is the same.
    """
    before, now = dict(before), asdict(config)
    before.setdefault("lora", asdict(LoraSection()))  # of a run from before there were adapters
    for key in _PATHS if knows_data else ():
        if key == "path" or (now["data"][key] and _shown(before, "data", key) != "''"):
            del now["data"][key]
    if config.lora.enabled:
        # So may the base model have: a load compares the digests of its weights.
        del now["model"]["path"]
    changes: list[str] = []
    for section in ("model", "lora", "data", "optim", "train", "runtime"):
        for key, value in now[section].items():
            if (section, key) == ("data", "sources") and (sources := _sources(before)) is not None:
                changes += _source_changes(sources, value, knows_data)
            elif _changes_numbers(section, key) and (old := _shown(before, section, key)) != repr(value):
                changes.append(f"{section}.{key} was {_words(old)} and is {_words(repr(value))}")
    return changes


def _changes_numbers(section: str, key: str) -> bool:
    keys = _NUMERIC_KEYS.get(section)
    return (section, key) not in _OTHER_KEYS if keys is None else key in keys


def _sources(config: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the sources of a checkpoint's config; None if they are no list of tables."""
    data = config.get("data")
    sources = data.get("sources", []) if isinstance(data, dict) else None
    known = isinstance(sources, list) and all(isinstance(source, dict) for source in sources)
    return sources if known else None


def _source_changes(
    before: list[dict[str, Any]], now: list[dict[str, Any]], knows_data: bool
) -> Iterator[str]:
    if len(before) != len(now):
        yield f"data.sources had {_listed(before)} and has {_listed(now)}"
        return
    defaults = asdict(SourceConfig(path=""))
    for number, (old, new) in enumerate(zip(before, now, strict=True), 1):
        for key, value in new.items():
            was = old.get(key, defaults[key])
            if was != value and not (knows_data and key == "path"):
                yield (
                    f"{key} of source {number} in data.sources ({_name(new)}) was {_words(repr(was))} and is "
                    f"{_words(repr(value))}"
                )


def _listed(sources: list[dict[str, Any]]) -> str:
    if not sources:
        return "none"
    return f"{len(sources)} ({', '.join(map(_name, sources))})"


def _name(source: dict[str, Any]) -> str:
    path = str(source.get("path", ""))
    return Path(path).name or path


def _words(shown: str) -> str:
    return "not set" if shown == "None" else shown


def _shown(config: dict[str, Any], section: str, key: str) -> str:
    """Return a value of a checkpoint's config; its default, if the key is newer than the checkpoint."""
    table = config.get(section)
    return repr(table.get(key, _default(section, key))) if isinstance(table, dict) else "not known"


def _default(section: str, key: str) -> Any:
    return getattr(getattr(Config(), section), key)
