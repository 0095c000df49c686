"""Timeout of every wait of a run, with a longer one for the first step of each kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

from penstock.base.errors import ConfigError

FIRST_TIMEOUT = 600.0
"""Seconds; the first steps compile, import and allocate, and ranks take different times for that."""


YEAR = 365 * 24 * 3600
"""Seconds; the longest timeout. Clocks and locks count in 64 bits, and sums of timeouts must not overflow."""


def require_timeout(timeout: object, name: str = "timeout") -> float:
    """Return a timeout; raise ConfigError unless it is a positive number of seconds, at most a year."""
    if isinstance(timeout, int | float) and 0 < timeout <= YEAR:
        return float(timeout)
    raise ConfigError(
        f"{name} must be a positive number of seconds, at most {YEAR} (a year), got {timeout!r}"
    )


class Timeout:
    """The timeout that every wait reads when it begins.

    Args:
        first: seconds that a wait may last until the first training step ends, and during the first evaluation (default:
            `timeout`).
    """

    def __init__(self, timeout: float, first: float | None = None) -> None:
        self.timeout = timeout
        self.first = timeout if first is None else first
        self.seconds = self.first
        self._done: set[bool] = set()

    @property
    def delta(self) -> timedelta:
        """`seconds` as a timedelta, for torch."""
        return timedelta(seconds=self.seconds)

    @property
    def longest(self) -> float:
        """The longer timeout in seconds, for slow work between steps, such as writing files."""
        return max(self.timeout, self.first)

    @contextlib.contextmanager
    def step(self, trains: bool) -> Iterator[None]:
        """Return a context for one step, with the `first` timeout until a step of its kind has succeeded."""
        self.seconds = self.timeout if trains in self._done else self.first
        try:
            yield
            self._done.add(trains)
        finally:
            self.seconds = self.timeout
