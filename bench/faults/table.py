"""Rows of the table of faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """Outcome of a row.

    Attributes:
        failures: differences from the expected outcome; empty if the row has passed.
        measured: figures, as text.
    """

    failures: list[str]
    measured: str

    @property
    def passed(self) -> bool:
        """True if there are no failures."""
        return not self.failures


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        number: number in the table.
        inject: description of the fault.
        passes: condition for passing, as text.
        run: ``run(folder, quick)``, with an empty folder for this row; quick means one case of each sort.
    """

    number: int
    inject: str
    passes: str
    run: Callable[[Path, bool], Outcome]


class Checks:
    """Collects differences from the expected outcome."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def that(self, holds: bool, otherwise: str) -> None:
        """Record `otherwise` as a failure unless the condition is true."""
        if not holds:
            self.failures.append(otherwise)

    def outcome(self, measured: str) -> Outcome:
        """Return the outcome, with its figures."""
        return Outcome(self.failures, measured)
