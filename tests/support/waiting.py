"""Waits for what has to happen."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], bool], limit: float = 60.0) -> None:
    """Wait until a condition is true; fail after `limit` seconds (default 60)."""
    end = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < end, f"waited {limit:g} s"
        time.sleep(0.02)
