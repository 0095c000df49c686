"""Objects of ranks in threads, in place of the user's during a step.

Two ranks that are threads must not accumulate into one gradient, so the second one of those that use a weight or a module
computes with a copy of the same memory. Outside of a step the model has its own objects: code that reads it, trains it
elsewhere or builds another pipeline on it finds one parameter where the model has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple


class Lent(NamedTuple):
    """An object that takes the place of another one during a step.

    Attributes:
        members: ``_parameters`` or ``_modules`` of the module that has it.
        name: its name there.
        value: the object of the rank.
    """

    members: dict[str, Any]
    name: str
    value: Any


class Lending:
    """The objects of this process's ranks, and whether they are in place."""

    def __init__(self) -> None:
        self._lent: list[Lent] = []
        self._in_place = False

    def add(self, lent: Sequence[Lent]) -> None:
        """Add objects; they are put in place with the others."""
        self._lent += lent

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context in which the ranks' objects are in place of the user's; a context within it changes nothing."""
        if self._in_place or not self._lent:
            yield
            return
        given = [members[name] for members, name, _ in self._lent]
        for members, name, value in self._lent:
            members[name] = value
        self._in_place = True
        try:
            yield
        finally:
            self._in_place = False
            for (members, name, _), before in zip(self._lent, given, strict=True):
                members[name] = before
