"""How long a wait may last: one number for all waits of a run, longer in the first step of its kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

from penstock.errors import ConfigError

FIRST_TIMEOUT = 600.0
"""Seconds; the first steps compile, import and allocate, and not every rank takes equally long for that."""


YEAR = 365 * 24 * 3600
"""Seconds; the longest limit. Clocks and locks count in 64 bits, and sums of limits must not overflow."""


def require_timeout(timeout: object, name: str = "timeout") -> float:
    """Return a timeout; raise ConfigError unless it is a positive number of seconds, at most a year."""
    if isinstance(timeout, int | float) and 0 < timeout <= YEAR:
        return float(timeout)
    raise ConfigError(
        f"{name} must be a positive number of seconds, at most {YEAR} (a year), not {timeout!r}"
    )


class Timeout:
    """What every wait asks when it begins.

    Args:
        timeout: the longest a wait may last, in seconds.
        first: the same until the first training step is done, and during the first evaluation; as `timeout` if None.

    Attributes:
        seconds: what counts now.
    """

    def __init__(self, timeout: float, first: float | None = None) -> None:
        self.timeout = timeout
        self.first = timeout if first is None else first
        self.seconds = self.first
        self._done: set[bool] = set()

    @property
    def delta(self) -> timedelta:
        """`seconds`, as torch takes it."""
        return timedelta(seconds=self.seconds)

    @property
    def longest(self) -> float:
        """Of the two, for what takes long beside the steps, such as writing files."""
        return max(self.timeout, self.first)

    @contextlib.contextmanager
    def step(self, trains: bool) -> Iterator[None]:
        """Around a step: the first one that ends well of each kind, training and evaluation, has the longer limit."""
        self.seconds = self.timeout if trains in self._done else self.first
        try:
            yield
            self._done.add(trains)
        finally:
            self.seconds = self.timeout
