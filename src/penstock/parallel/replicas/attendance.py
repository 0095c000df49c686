"""Attendance at collectives, recorded in the store, for processes that cannot see each other.

When a collective times out, torch does not say which process is missing; when a connection breaks, it names a neighbour,
which may only have given up. So a process that has waited for a while records its presence once in the rendezvous store,
and one whose wait has failed reads which others have not. If all come in time, the store is neither written nor read.

The host of the store may be the one that is frozen or unreachable. So a thread accesses the store, with a timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from time import monotonic, sleep
from typing import Any, TypeVar

from torch import distributed as dist

from penstock.base.counts import few

T = TypeVar("T")

_PATIENCE = 1.0  # seconds of waiting before a process records its presence
REPORT_SECONDS = 3.0
"""Seconds in which processes that wait have recorded it, once a connection is broken: more than they wait before."""
_STORE_TIMEOUT = 2.0  # seconds
_POLL_INTERVAL = 0.1  # seconds


class Attendance:
    """Records of all collectives in a store.

    Args:
        prefix: prefix of the keys; the same on every process, and never used before.
    """

    def __init__(self, store: Any, prefix: str, names: Mapping[int, str]) -> None:
        self.store, self.prefix, self.names = store, prefix, names
        self._counts: dict[str, int] = {}

    def enter(self, group: dist.ProcessGroup | None) -> Visit:
        """Begin the next collective of a group; its processes must begin collectives in the same order."""
        name = "all" if group is None else group.group_name
        number = self._counts[name] = self._counts.get(name, 0) + 1
        ranks = list(self.names) if group is None else dist.get_process_group_ranks(group)
        return Visit(self, f"{self.prefix}/{name}/{number}", ranks)


class Visit:
    """One process's part in one collective."""

    def __init__(self, attendance: Attendance, key: str, ranks: Sequence[int]) -> None:
        self._attendance, self._key, self._ranks = attendance, key, ranks
        self._began = monotonic()
        self._announced = False

    def waits(self, timeout: float) -> None:
        """Record this process's presence once it has waited for a while; call it repeatedly while waiting."""
        # With a short timeout earlier: everyone present must be recorded before the first wait ends.
        if not self._announced and monotonic() - self._began >= min(_PATIENCE, timeout / 4):
            self._announce()

    def missing(self, patience: float = 0.0) -> str:
        """Return a message that names the missing processes; empty if none is missing."""
        deadline = monotonic() + patience
        if not self._announced:
            self._announce()
        while True:
            absent = _run_with_timeout(_STORE_TIMEOUT, self._absent)
            if absent is None:
                return f"the store where the processes met, with {self._attendance.names[0]}, does not answer"
            if not absent or monotonic() >= deadline:
                break
            sleep(_POLL_INTERVAL)
        names = [self._attendance.names[rank] for rank in absent]
        return f"{few(names)} did not come" if names else ""

    def _announce(self) -> None:
        self._announced = True
        key = f"{self._key}/{dist.get_rank()}"
        _run_with_timeout(_STORE_TIMEOUT, lambda: self._attendance.store.set(key, "here"))

    def _absent(self) -> list[int]:
        return [rank for rank in self._ranks if not self._attendance.store.check([f"{self._key}/{rank}"])]


def _run_with_timeout(seconds: float, job: Callable[[], T]) -> T | None:
    """Run a job in a thread; return its result, or None if it is not done in time (the thread is left alone)."""
    results: list[T] = []

    def run() -> None:
        try:
            results.append(job())
        except RuntimeError:  # the connection to the store broke
            return

    thread = Thread(target=run, name="penstock-attendance", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
