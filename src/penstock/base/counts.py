"""Counts that users give, checked; and counts with their nouns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from penstock.base.errors import ConfigError


def is_count(value: object, least: int = 1, most: int | None = None) -> TypeGuard[int]:
    """Return whether a value is a whole number within bounds (default: at least 1); True and False are not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        return False
    return most is None or value <= most


def require_count(
    name: str,
    value: object,
    least: int = 1,
    most: int | None = None,
    kind: type[ConfigError] = ConfigError,
) -> None:
    """Raise a `ConfigError`, or a `kind` of it, unless a value is a whole number within bounds (default: at least 1)."""
    if not is_count(value, least, most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise kind(f"{name} must be a whole number {bounds}, got {value!r}")


def few(values: Sequence[object], most: int = 8) -> str:
    """Name some values, and the number of the others, such as "a, b and 3 more"."""
    shown = ", ".join(map(str, values[:most]))
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 rank" or "2 ranks"."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count} {noun}{ending}"


def describe_size(ranks: int, stages: int, microbatches: int) -> str:
    """Return the size of a schedule, such as "2 ranks, 4 stages, 8 microbatches"."""
    return f"{plural(ranks, 'rank')}, {plural(stages, 'stage')}, {plural(microbatches, 'microbatch')}"
