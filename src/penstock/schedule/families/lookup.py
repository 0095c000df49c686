"""Families by name, of the catalogue or of the user, and `build_schedule`, which builds a schedule of one.

A family of the user is a function: registered under a name of its own, or found as MODULE:FUNCTION.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from penstock.base.current_folder import current_folder_last
from penstock.base.errors import ScheduleCodeError, ScheduleError, nearest
from penstock.schedule.families.catalogue import FAMILIES
from penstock.schedule.families.family import Family
from penstock.schedule.families.own_family import OwnFamily, ScheduleFunction, load_function, where_defined
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import is_csv

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_REFERENCE = re.compile(r"(\w+(?:\.\w+)*):(\w+(?:\.\w+)*)")

_registered: dict[str, OwnFamily] = {}


def find_family(name: str) -> Family | None:
    """Return the family that a name means: of the catalogue, registered, or MODULE:FUNCTION; None if there is none."""
    return _referenced(name) if ":" in name else FAMILIES.get(name) or _registered.get(name)


def require_family(name: str) -> Family:
    """Return the family that a name means, or raise `ScheduleError` with the nearest names."""
    family = find_family(name)
    if family is None:
        known = [*FAMILIES, *sorted(_registered)]
        own = f"; for a schedule of your own in {name}, give MODULE:FUNCTION" if name.endswith(".py") else ""
        raise ScheduleError(
            f"no schedule family {name!r}{nearest(name, known)}; there are {', '.join(known)}{own}"
        )
    return family


def build_schedule(
    name: str, ranks: int, microbatches: int, virtual_stages: int | None = None, **options: object
) -> Schedule:
    """Build a schedule by the name of its family.

    Args:
        name: family name: a key of `FAMILIES`, a family of the user, or MODULE:FUNCTION.
        ranks: number of ranks, at least 1.
        microbatches: number of microbatches in a step, at least 1.
        virtual_stages: number of stages per rank (default: the family's).
        options: keyword arguments of the family's rule besides the counts.

    Raises:
        ScheduleError: if there is no such family or option, or the family does not allow the counts.
    """
    return require_family(name).build(ranks, microbatches, virtual_stages, **options)


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
    _registered[name] = OwnFamily(name, function)


def _objection(name: object) -> str | None:
    """Return why a name cannot be one of the user's families; None if it can."""
    if name in FAMILIES:
        return f"{name} is a family of the catalogue; take another name"
    if not isinstance(name, str) or not _NAME.fullmatch(name) or is_csv(name):
        return (
            "a family's name must be letters, digits, and any of _ . + - between them, such as my-zigzag, got "
            f"{name!r}"
        )
    return None


def _referenced(name: str) -> OwnFamily:
    """Return the family that MODULE:FUNCTION means."""
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
        return OwnFamily(name, load_function(match[1], match[2], name))


def _target(function: Callable[..., object]) -> str:
    """Return MODULE:FUNCTION of a function."""
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', repr(function))}"
