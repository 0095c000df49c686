"""What a row of the table is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """What was seen.

    Attributes:
        failures: what should have been otherwise; empty if the row has passed.
        measured: figures, in words.
    """

    failures: list[str]
    measured: str

    @property
    def passed(self) -> bool:
        """Whether all was as it should be."""
        return not self.failures


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        number: in the table.
        inject: what is done, in words.
        passes: when it passes, in words.
        run: ``run(folder, quick)``, with an empty folder of its own; quick is one case of each sort.
    """

    number: int
    inject: str
    passes: str
    run: Callable[[Path, bool], Outcome]


class Checks:
    """Collects what is not as it should be."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def that(self, holds: bool, otherwise: str) -> None:
        """Note `otherwise` unless it holds."""
        if not holds:
            self.failures.append(otherwise)

    def outcome(self, measured: str) -> Outcome:
        """With the figures."""
        return Outcome(self.failures, measured)
