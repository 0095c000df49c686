"""What is known to fail and is left out until it is mended; this list is to become empty."""

from __future__ import annotations

from collections.abc import Callable

from tests.zoo.case import Case, draw
from tests.zoo.kind import KINDS

NOT_YET: dict[str, str] = {}
"""Kinds, with the reason."""

TOGETHER: list[tuple[str, Callable[[Case], bool]]] = []
"""What fails in company, with the reason."""


def known(case: Case) -> str:
    """Why a case is left out; empty if it is not."""
    for name in case.kinds:
        if name in NOT_YET:
            return NOT_YET[name]
    return next((why for why, together in TOGETHER if together(case)), "")


def ready() -> tuple[str, ...]:
    """The kinds that cases are drawn from."""
    return tuple(name for name in KINDS if name not in NOT_YET)


def drawn(first: int, count: int, transport: str) -> list[Case]:
    """So many cases, of the seeds from `first` on that are not left out."""
    found: list[Case] = []
    seed = first
    while len(found) < count:
        case = draw(seed, ready(), transport)
        if not known(case):
            found.append(case)
        seed += 1
    return found
