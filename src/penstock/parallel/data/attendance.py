"""Who has come to a collective, told through the store: for processes that cannot see each other.

A collective says that somebody did not come, and not who; a connection that breaks names a neighbour, who may only have
given up. So a process that has waited for a while says so, once, in the store where they met; and one that waited in vain
looks who has not. Nothing is written, and nobody is asked, where all come in time.

The store is on a host, too, which may be the one that is frozen or cut off. So it is asked in a thread, for a limited time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread
from time import monotonic, sleep
from typing import Any, TypeVar

from torch import distributed as dist

T = TypeVar("T")

_PATIENCE = 1.0  # seconds of waiting before a process says that it is here
_ANSWER = 2.0  # seconds for the store
_LOOK = 0.1
_MOST = 8  # names in a message


class Attendance:
    """The store, and what to call the processes.

    Args:
        store: of ``torch.distributed``, used by nothing else at the same time.
        prefix: of keys; the same on every process, and never used before.
        names: of all processes.
    """

    def __init__(self, store: Any, prefix: str, names: Sequence[str]) -> None:
        self.store, self.prefix, self.names = store, prefix, names
        self._counts: dict[str, int] = {}

    def enter(self, group: dist.ProcessGroup | None) -> Visit:
        """Begin the next collective of a group; all of its processes do, in one order."""
        name = "all" if group is None else group.group_name
        number = self._counts[name] = self._counts.get(name, 0) + 1
        ranks = range(len(self.names)) if group is None else dist.get_process_group_ranks(group)
        return Visit(self, f"{self.prefix}/{name}/{number}", ranks)


class Visit:
    """One collective, seen from one process."""

    def __init__(self, attendance: Attendance, key: str, ranks: Sequence[int]) -> None:
        self._attendance, self._key, self._ranks = attendance, key, ranks
        self._began = monotonic()
        self._said = False

    def waits(self, limit: float) -> None:
        """Say that this process is here, once it has waited for a while; to be called now and then.

        Args:
            limit: seconds for which it will wait in all.
        """
        if not self._said and monotonic() - self._began >= min(_PATIENCE, limit / 4):
            self._say()

    def missing(self, patience: float = 0.0) -> str:
        """Who has not come; empty if all have.

        Args:
            patience: seconds for the others to say that they have.
        """
        until = monotonic() + patience
        if not self._said:
            self._say()
        while True:
            absent = _within(_ANSWER, self._absent)
            if absent is None:
                return "the store where the processes met, on the host of rank 0, does not answer"
            if not absent or monotonic() >= until:
                break
            sleep(_LOOK)
        names = [self._attendance.names[rank] for rank in absent]
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        return f"{', '.join(names[:_MOST])}{more} did not come" if names else ""

    def _say(self) -> None:
        self._said = True
        key = f"{self._key}/{dist.get_rank()}"
        _within(_ANSWER, lambda: self._attendance.store.set(key, "here"))

    def _absent(self) -> list[int]:
        return [rank for rank in self._ranks if not self._attendance.store.check([f"{self._key}/{rank}"])]


def _within(seconds: float, job: Callable[[], T]) -> T | None:
    """What a job returns, if it does so in time; one that does not is left alone."""
    found: list[T] = []

    def run() -> None:
        try:
            found.append(job())
        except RuntimeError:  # the connection to the store broke
            return

    thread = Thread(target=run, name="penstock-attendance", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
