"""Assign parameters to the groups of an optimizer: by name, with the same groups on every rank."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.base.errors import ConfigError

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline

Named = list[tuple[str, nn.Parameter]]
Match = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Group:
    """One group as the user gave it."""

    label: str
    match: Match
    names: tuple[str, ...]
    options: dict[str, Any]


def assign(
    pipe: Pipeline, given: Sequence[Mapping[str, Any]] | None
) -> tuple[dict[int, list[Named]], list[dict[str, Any]]]:
    """Put every parameter into the first group that takes it, and what no group takes into one more at the end.

    Every process calls it, with the same groups.

    Returns:
        (name, parameter) pairs by rank and group, a list that may be empty; and optimizer options by group.
    """
    groups = list(read_groups(given or []))
    ranks: dict[int, list[Named]] = {
        rank: [[] for _ in range(len(groups) + 1 if groups else 1)] for rank in pipe.local_ranks
    }
    for rank, taken in ranks.items():
        for name, parameter in pipe.rank_parameters(rank):
            matching = (n for n, group in enumerate(groups) if group.match(name, parameter))
            taken[next(matching, -1)].append((name, parameter))
    _require_used(pipe, groups, ranks)
    return ranks, [dict(group.options) for group in groups] + [{}]


def _require_used(pipe: Pipeline, groups: list[Group], ranks: dict[int, list[Named]]) -> None:
    names = {name for taken in ranks.values() for group in taken for name, _ in group}
    counts = [float(sum(len(taken[n]) for taken in ranks.values())) for n in range(len(groups))]
    listed = [(group.label, name) for group in groups for name in group.names]
    counts += [float(name in names) for _, name in listed]
    totals = pipe.sum_over_ranks(torch.tensor(counts, dtype=torch.float64)).tolist() if counts else []
    problems = [
        f"{label} names {name!r}, which is not a parameter of the model"
        for (label, name), count in zip(listed, totals[len(groups) :], strict=True)
        if not count
    ]
    problems += [
        f"{group.label} takes no parameter of the model: none matches that an earlier group has not taken"
        for group, count in zip(groups, totals[: len(groups)], strict=True)
        if not count and not group.names
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def read_groups(given: object) -> Iterator[Group]:
    """Read the groups that a user gave, and check all of them but what depends on the model."""
    if not isinstance(given, list | tuple):
        raise ConfigError(f"groups must be a list of dictionaries, got {given!r}")
    for n, group in enumerate(given):
        if not isinstance(group, Mapping) or ("match" in group) == ("names" in group):
            raise ConfigError(
                f"groups[{n}] must be a dictionary with either 'match' (a regular expression, or a function of name and "
                f"parameter) or 'names' (a list), and options of the optimizer; it is {group!r}"
            )
        options = {key: value for key, value in group.items() if key not in ("match", "names")}
        if not callable(options.get("optimizer", dict)):
            raise ConfigError(
                f"groups[{n}]: 'optimizer' must be a class of torch.optim or a function that makes one, got "
                f"{options['optimizer']!r}"
            )
        for key in ("lr", "weight_decay"):  # torch checks those of the defaults alone
            if isinstance(value := options.get(key), int | float) and not value >= 0:
                raise ConfigError(f"groups[{n}]: {key!r} must be at least 0, got {value!r}")
        if "params" in options:
            raise ConfigError(f"groups[{n}] has 'params'; choose parameters by 'match' or 'names' instead")
        if "names" in group:
            names = group["names"]
            if isinstance(names, str) or not isinstance(names, Sequence) or not names:
                raise ConfigError(
                    f"groups[{n}]: 'names' must be a list of names of parameters, got {names!r}"
                )
            yield Group(f"groups[{n}]", partial(_is_named, frozenset(names)), tuple(names), options)
        else:
            label, match = _match(n, group["match"])
            yield Group(f"groups[{n}] (match {label})", match, (), options)


def _is_named(names: frozenset[str], name: str, parameter: nn.Parameter) -> bool:
    return name in names


def _match(n: int, match: object) -> tuple[str, Match]:
    if isinstance(match, str):
        try:
            pattern = re.compile(match)
        except re.error as error:
            raise ConfigError(
                f"groups[{n}]: {match!r} is not a regular expression: {error}; see the documentation of Python's re module"
            ) from error
        return repr(match), lambda name, _: bool(pattern.search(name))
    if not callable(match):
        raise ConfigError(
            f"groups[{n}]: 'match' must be a regular expression or a function of name and parameter, got {match!r}"
        )
    try:
        inspect.signature(match).bind("", None)
    except TypeError as error:
        raise ConfigError(
            f"groups[{n}]: 'match' must be a function of name and parameter: {error}"
        ) from error
    except ValueError:  # a function written in C has no signature
        pass
    return str(getattr(match, "__name__", match)), lambda name, parameter: bool(match(name, parameter))
