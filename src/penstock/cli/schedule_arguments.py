"""Arguments and options that name a schedule: a family with its counts and options, the user's function, or a CSV file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import wraps
from typing import Any

import click

from penstock.base.bounded_io import parse_json
from penstock.base.errors import ConfigError
from penstock.cli.options import Command, choice, count
from penstock.schedule.families import require_family
from penstock.schedule.notation import require_backward
from penstock.schedule.residency import Sharding
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import is_csv, read_csv

VIRTUAL_STAGES = count(
    "--virtual-stages",
    "-v",
    help="Stages per rank, for families where it can be chosen. Default: the family's.",
)


def schedule_options(function: Command) -> Command:
    """Add the options that say, together with a name, which schedule is meant."""
    for decorate in reversed((
        count("--ranks", "-p", help="Pipeline ranks. A CSV file sets its own."),
        count("--microbatches", "-m", help="Microbatches per step. A CSV file sets its own."),
        VIRTUAL_STAGES,
        click.option(
            "--option", "-o", "options", multiple=True, metavar="NAME=VALUE",
            help="Another parameter of the family, such as group_size=4; for a CSV file, backward=full or backward=input "
            "says what B means. May be repeated.",
        ),
    )):  # fmt: skip
        function = decorate(function)
    return function


def sharding_options(function: Command) -> Command:
    """Add the options that say what replicas divide or a store keeps, given to the command as one `sharding`."""

    @wraps(function)
    def command(*args: Any, shard: Any, window: Any, reduce_every: Any, store: Any, **named: Any) -> object:
        return function(*args, sharding=Sharding(shard, window, reduce_every, store), **named)

    for decorate in reversed((
        choice(
            "--shard", "none", "optimizer", "gradients", "weights",
            help="What replicas divide, each with what comes before it (ZeRO-1, -2 and -3).",
        ),
        count(
            "--window",
            help="Stages whose weights a rank may hold at once, with --shard weights or --store. Default: all of the rank.",
        ),
        count(
            "--reduce-every",
            help="Microbatches whose gradients are added up before replicas sum them. Default: all of the step.",
        ),
        choice(
            "--store", "none", "host", "disk",
            help="Where weights are while no op reads them, and gradients once they are added up.",
        ),
    )):  # fmt: skip
        command = decorate(command)
    return command  # type: ignore[return-value]  # takes other options than the function


def need_counts(name: str, ranks: int | None, microbatches: int | None) -> tuple[int, int]:
    """Return the counts that every family needs."""
    if ranks is None or microbatches is None:
        missing = "--ranks" if ranks is None else "--microbatches"
        raise ConfigError(f"{name} is a family and needs {missing}")
    return ranks, microbatches


def find_schedule(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    virtual_stages: int | None,
    options: Mapping[str, object],
) -> Schedule:
    """Build the schedule of a family, or read it from a file, whose counts must equal any counts that are passed.

    A file has one option, ``backward``; see `penstock.schedule.text.read_csv`.
    """
    if not is_csv(name):
        family = require_family(name)
        p, m = need_counts(name, ranks, microbatches)
        return family.build(p, m, virtual_stages, **options)
    if others := [option for option in options if option != "backward"]:
        raise ConfigError(
            f"{name} is a file, whose only option is backward=auto|full|input, got {others[0]!r}"
        )
    schedule = read_csv(name, require_backward(options.get("backward", "auto")))
    counts = {
        "ranks": (schedule.ranks, ranks),
        "microbatches": (schedule.microbatches, microbatches),
        "virtual stages": (schedule.stages // schedule.ranks, virtual_stages),
    }
    for noun, (actual, wanted) in counts.items():
        if wanted not in (None, actual):
            raise ConfigError(f"{name} is a schedule of {actual} {noun}, not {wanted}; leave the option out")
    return schedule


def named_values(options: Iterable[str]) -> dict[str, object]:
    """Parse NAME=VALUE pairs; a value is a number, a list of numbers as in [1,2,3], or a word."""
    values: dict[str, object] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option must be NAME=VALUE, such as group_size=4, got {option!r}")
        try:
            values[name] = parse_json(text)
        except ValueError:
            values[name] = text
    return values
