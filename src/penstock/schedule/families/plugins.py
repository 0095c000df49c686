"""Families of the user by name: registered ones, those of installed packages, and MODULE:FUNCTION.

A package offers families as entry points of the group ``penstock.schedules``; nothing of it is imported before one of its
names is used, or the families are listed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import EntryPoint, distributions
from typing import NamedTuple

from penstock.current_folder import current_folder_last
from penstock.errors import ScheduleCodeError, ScheduleError, first_line
from penstock.schedule.families.catalogue import FAMILIES
from penstock.schedule.families.own_family import OwnFamily, ScheduleFunction, load_function, where_defined
from penstock.schedule.text import is_csv

GROUP = "penstock.schedules"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_REFERENCE = re.compile(r"(\w+(?:\.\w+)*):(\w+(?:\.\w+)*)")

_registered: dict[str, OwnFamily] = {}


class OwnFamilies(NamedTuple):
    """All families of the user that have a name.

    Attributes:
        families: those that can be used, by name.
        problems: descriptions of those that cannot, with what offers them.
    """

    families: dict[str, OwnFamily]
    problems: list[str]


def register_family(name: str, function: ScheduleFunction) -> None:
    """Give a schedule function a name, under which this process finds it wherever a schedule is named.

    In processes, each one registers it. Registering a function of the same module and name again replaces it, as when a
    notebook's cell runs twice.

    Args:
        name: letters, digits, and any of ``_ . + -`` between them.
        function: function of the counts; see `OwnFamily`.

    Raises:
        ScheduleError: if the name is no such text or has another meaning, or the function cannot be called with the counts.
    """
    if (objection := _objection(name)) is not None:
        raise ScheduleError(objection)
    if not callable(function):
        raise ScheduleError(f"the family {name} must be a function, got {function!r}")
    known = _registered.get(name)
    if known is not None and _target(known.rule) != _target(function):
        raise ScheduleError(
            f"a family {name} is registered already, from {where_defined(known.rule)}; take another name"
        )
    origin = f"registered ({where_defined(function)})"
    _registered[name] = OwnFamily(name, function, origin)


def find_own(name: str) -> OwnFamily | None:
    """Return the family of the user that a name means: registered, of a package, or MODULE:FUNCTION; None if there is none.

    Raises:
        ScheduleError: if several offer the name, or the code behind it cannot be used.
    """
    if ":" in name:
        return _referenced(name)
    registered, points = _registered.get(name), _offers(tuple(sys.path)).points.get(name, ())
    offers = {point.value for point in points}
    if registered is not None:
        offers.add(_target(registered.rule))
    if len(offers) > 1:
        raise ScheduleError(_ambiguous(name, registered, points))
    return registered if registered is not None else _loaded(name, points[0]) if points else None


def own_names() -> list[str]:
    """Return the names of the user's families, without importing any; some may turn out to be unusable."""
    offered = [name for name in _offers(tuple(sys.path)).points if _objection(name) is None]
    return sorted({*_registered, *offered})


def own_families() -> OwnFamilies:
    """Import all families of the user that have a name; those that cannot be used are described, and raise nothing."""
    offers = _offers(tuple(sys.path))
    families, problems = {}, list(offers.problems)
    for name, points in offers.points.items():
        if (objection := _objection(name)) is not None:
            problems.append(f"{' and '.join(map(_source, points))}: {objection}")
    for name in own_names():
        try:
            family = find_own(name)
        except ScheduleError as error:
            problems.append(str(error))
            continue
        assert family is not None, "it has a name"
        families[name] = family
    return OwnFamilies(families, problems)


_RULE = "letters, digits, and any of _ . + - between them, such as my-zigzag"


def _objection(name: object) -> str | None:
    """Return why a name cannot be one of the user's families; None if it can."""
    if name in FAMILIES:
        return f"{name} is a family of the catalogue; take another name"
    if not isinstance(name, str) or not _NAME.fullmatch(name) or is_csv(name):
        return f"a family's name must be {_RULE}, got {name!r}"
    return None


class _Offers(NamedTuple):
    """Entry points of packages by name, and descriptions of packages whose entry points cannot be read."""

    points: dict[str, tuple[EntryPoint, ...]]
    problems: list[str]


@lru_cache(maxsize=8)
def _offers(path: tuple[str, ...]) -> _Offers:
    """Return the entry points of packages on Python's path."""
    points: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    problems = []
    for package in distributions():
        name = f"in {package.locate_file('')}"
        try:
            if GROUP not in (package.read_text("entry_points.txt") or ""):
                continue
            name = package.metadata["Name"] or name
            for point in package.entry_points.select(group=GROUP):
                # A package that is on the path twice, as when it runs from its folder, is still one.
                points.setdefault(point.name, {}).setdefault((name, point.value), point)
        except Exception as error:  # whatever is in the files of others
            problems.append(f"package {name}: its entry points cannot be read: {first_line(error)}")
    return _Offers({name: tuple(offers.values()) for name, offers in sorted(points.items())}, problems)


@lru_cache(maxsize=256)
def _loaded(name: str, point: EntryPoint) -> OwnFamily:
    """Return the family of an entry point.

    Raises:
        ScheduleCodeError: if it cannot be used; names the package.
    """
    match = _REFERENCE.fullmatch(point.value.partition("[")[0].strip())
    if match is None:
        raise ScheduleCodeError(f"{_source(point)}: {name} must be MODULE:FUNCTION, got {point.value!r}")
    try:
        return OwnFamily(name, load_function(match[1], match[2], name), _source(point))
    except ScheduleCodeError as error:
        raise ScheduleCodeError(f"{_source(point)}: {error}") from error


def _referenced(name: str) -> OwnFamily:
    """Return the family that MODULE:FUNCTION means.

    Raises:
        ScheduleCodeError: if there is no such function.
    """
    match = _REFERENCE.fullmatch(name)
    if match is None or match[1].endswith(".py"):
        near = ""
        if ".py:" in name:
            file, _, function = name.partition(":")
            near = (
                f"; write {os.path.basename(file).removesuffix('.py')}:{function} in the folder of the file"
            )
        raise ScheduleCodeError(
            f"a schedule of your own is MODULE:FUNCTION, such as zigzag:build, got {name!r}{near}"
        )
    with current_folder_last():
        found = load_function(match[1], match[2], name)
    return OwnFamily(name, found, where_defined(found))


def _target(function: Callable[..., object]) -> str:
    """Return MODULE:FUNCTION of a function."""
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', repr(function))}"


def _source(point: EntryPoint) -> str:
    package = "" if point.dist is None else f"package {point.dist.name} {point.dist.version} "
    return f"{package}({point.value})"


def _ambiguous(name: str, registered: OwnFamily | None, points: tuple[EntryPoint, ...]) -> str:
    offers = [*([] if registered is None else [registered.origin]), *map(_source, points)]
    return f"several offer a family {name}: {' and '.join(offers)}; name the one you mean as MODULE:FUNCTION"
