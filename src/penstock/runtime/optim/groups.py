"""Which parameter is in which group of an optimizer: by name, the same groups on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline

Named = list[tuple[str, nn.Parameter]]
Match = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Group:
    """One group as the user gave it.

    Attributes:
        what: it is called in errors.
        match: whether it wants a parameter.
        names: those it lists; each has to exist.
        options: of the optimizer.
    """

    what: str
    match: Match
    names: tuple[str, ...]
    options: dict[str, Any]


def assign(
    pipe: Pipeline, given: Sequence[Mapping[str, Any]] | None
) -> tuple[dict[int, list[Named]], list[dict[str, Any]]]:
    """Put every parameter into the first group that wants it, and the others into one more at the end.

    Every process calls it, with the same groups.

    Returns:
        By rank and group the (name, parameter) pairs, a list that may be empty; and by group the optimizer's options.

    Raises:
        ConfigError: a group that is none, or takes no parameter on any rank; a name no layer has. All are listed.
    """
    groups = list(_read(given or []))
    ranks = {rank: [[] for _ in range(len(groups) + 1 if groups else 1)] for rank in pipe.local_ranks}  # type: dict[int, list[Named]]
    for rank, parts in ranks.items():
        for name, parameter in pipe.rank_parameters(rank):
            wanted = (n for n, group in enumerate(groups) if group.match(name, parameter))
            parts[next(wanted, -1)].append((name, parameter))
    _require_used(pipe, groups, ranks)
    return ranks, [dict(group.options) for group in groups] + [{}]


def _require_used(pipe: Pipeline, groups: list[Group], ranks: dict[int, list[list[tuple[str, Any]]]]) -> None:
    """Count on all ranks what each group has taken and how often each listed name occurs."""
    here = {name for parts in ranks.values() for part in parts for name, _ in part}
    counts = [float(sum(len(parts[n]) for parts in ranks.values())) for n in range(len(groups))]
    listed = [(group.what, name) for group in groups for name in group.names]
    counts += [float(name in here) for _, name in listed]
    found = pipe.sum_over_ranks(torch.tensor(counts, dtype=torch.float64)).tolist() if counts else []
    problems = [
        f"{what} names {name!r}, which is no parameter of the model"
        for (what, name), count in zip(listed, found[len(groups) :], strict=True)
        if not count
    ]
    problems += [
        f"{group.what} takes no parameter of the model: none matches that an earlier group has not taken"
        for group, count in zip(groups, found[: len(groups)], strict=True)
        if not count and not group.names
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def _read(given: object) -> Iterator[Group]:
    if not isinstance(given, list | tuple):
        raise ConfigError(f"groups must be a list of dictionaries, not {given!r}")
    for n, one in enumerate(given):
        if not isinstance(one, Mapping) or ("match" in one) == ("names" in one):
            raise ConfigError(
                f"groups[{n}] must be a dictionary with either 'match' (a regular expression, or a function of name and "
                f"parameter) or 'names' (a list), and options of the optimizer; it is {one!r}"
            )
        options = {key: value for key, value in one.items() if key not in ("match", "names")}
        if "params" in options:
            raise ConfigError(f"groups[{n}] has 'params'; parameters are chosen by 'match' or 'names'")
        if "names" in one:
            yield _by_names(n, one["names"], options)
        else:
            yield _by_match(n, one["match"], options)


def _by_names(n: int, names: object, options: dict[str, Any]) -> Group:
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise ConfigError(f"groups[{n}]: 'names' must be a list of names of parameters, not {names!r}")
    chosen = frozenset(names)
    return Group(f"groups[{n}]", lambda name, _: name in chosen, tuple(names), options)


def _by_match(n: int, match: object, options: dict[str, Any]) -> Group:
    if isinstance(match, str):
        try:
            pattern = re.compile(match)
        except re.error as error:
            raise ConfigError(
                f"groups[{n}]: {match!r} is no regular expression: {error} (Python's re module says how they are written)"
            ) from error
        return Group(
            f"groups[{n}] (match {match!r})", lambda name, _: bool(pattern.search(name)), (), options
        )
    if not callable(match):
        raise ConfigError(
            f"groups[{n}]: 'match' must be a regular expression or a function of name and parameter, not {match!r}"
        )
    return Group(
        f"groups[{n}] (match {getattr(match, '__name__', match)})",
        lambda name, parameter: bool(match(name, parameter)),
        (),
        options,
    )
