"""The schedule that a command line names: a family with its counts and options, or a CSV file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from penstock.bounded_io import parse_json
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.schedule.schedule import Schedule


def need_counts(name: str, ranks: int | None, microbatches: int | None) -> tuple[int, int]:
    """The counts that a family cannot do without.

    Raises:
        ConfigError: one is missing.
    """
    if ranks is None or microbatches is None:
        missing = "--ranks" if ranks is None else "--microbatches"
        raise ConfigError(f"{name} is a family, and {missing} is missing")
    return ranks, microbatches


def find_schedule(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    virtual_stages: int | None,
    options: Mapping[str, object],
) -> Schedule:
    """Build the schedule, or read it; a file's counts are its own, and counts given besides must be these.

    Raises:
        ConfigError: no such family, a file that cannot be read, or counts or options that do not suit.
    """
    from penstock.schedule.families import FAMILIES, build_schedule
    from penstock.schedule.text import read_csv

    if not name.lower().endswith(".csv"):
        # An unknown name is to be told first, whatever counts are given.
        p, m = need_counts(name, ranks, microbatches) if name in FAMILIES else (1, 1)
        return build_schedule(name, p, m, virtual_stages, **options)
    found = read_csv(name)
    own = (found.ranks, found.microbatches, found.stages // found.ranks)
    counts = (ranks, microbatches, virtual_stages)
    for what, given, its in zip(("ranks", "microbatches", "virtual stages"), counts, own, strict=True):
        if given not in (None, its):
            raise ConfigError(f"{name} is a schedule of {its} {what}, not {given}; leave the option out")
    if options:
        raise ConfigError(f"{name} is a file, and takes no --option")
    return found


def named_values(options: Iterable[str]) -> dict[str, object]:
    """What several NAME=VALUE say; a value is a number, a list of numbers as in [1,2,3], or a word.

    Raises:
        ConfigError: one is no NAME=VALUE.
    """
    found: dict[str, object] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option is NAME=VALUE, as in group_size=4, not {option!r}")
        try:
            found[name] = parse_json(text)
        except ValueError:
            found[name] = text
    return found
