"""Families by name, and `build_schedule`, which builds a schedule of one."""

from __future__ import annotations

from penstock.errors import ScheduleError, nearest
from penstock.schedule.families.catalogue import FAMILIES
from penstock.schedule.families.family import Family
from penstock.schedule.families.plugins import find_own, own_names
from penstock.schedule.schedule import Schedule


def find_family(name: str) -> Family | None:
    """Return the family that a name means, of the catalogue or of the user; None if there is none.

    Args:
        name: name of the catalogue, a name that was registered or that a package offers, or MODULE:FUNCTION.

    Raises:
        ScheduleError: if several offer the name, or the user's code behind it cannot be used.
    """
    return FAMILIES.get(name) or find_own(name)


def require_family(name: str) -> Family:
    """Return the family that a name means.

    Raises:
        ScheduleError: if there is none; names the nearest ones.
    """
    family = find_family(name)
    if family is None:
        known = [*FAMILIES, *own_names()]
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
