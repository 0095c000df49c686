"""Differences between the configs of a checkpoint and of the run that resumes from it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.train.config.config import Config

_NUMERIC_KEYS = {"train": ("seed", "batch", "accumulate", "reduction"), "runtime": ("precision",)}
"""Keys that change the numbers; so do all of ``[model]``, ``[optim]`` and ``[data]`` but ``data.changed``."""
_PATHS = ("path", "held_out_path")


def config_changes(before: dict[str, Any], config: Config, *, knows_data: bool) -> list[str]:
    """Return the keys that change a run's numbers and differ from a checkpoint's config, a phrase each.

    Args:
        before: config that the checkpoint was saved with, section by section.
        config: config of the run.
        knows_data: whether the checkpoint has a digest of its data. The data may then have moved: the digest tells whether
            it is the same.
    """
    before, now = dict(before), asdict(config)
    for key in _PATHS if knows_data else ():
        if key == "path" or (now["data"][key] and _shown(before, "data", key) != "''"):
            del now["data"][key]
    changes: list[str] = []
    for section in ("model", "data", "optim", "train", "runtime"):
        for key, value in now[section].items():
            if _changes_numbers(section, key) and (old := _shown(before, section, key)) != repr(value):
                changes.append(f"{section}.{key} was {_words(old)} and is {_words(repr(value))}")
    return changes


def _changes_numbers(section: str, key: str) -> bool:
    keys = _NUMERIC_KEYS.get(section)
    return (section, key) != ("data", "changed") if keys is None else key in keys


def _words(shown: str) -> str:
    return "not set" if shown == "None" else shown


def _shown(config: dict[str, Any], section: str, key: str) -> str:
    """Return a value of a checkpoint's config; its default, if the key is newer than the checkpoint."""
    table = config.get(section)
    return repr(table.get(key, _default(section, key))) if isinstance(table, dict) else "not known"


def _default(section: str, key: str) -> Any:
    return getattr(getattr(Config(), section), key)
