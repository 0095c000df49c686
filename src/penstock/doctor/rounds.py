"""Checks that every rank makes, with answers that every rank gets, even where messages between ranks do not work yet.

The answers go through the store that the processes met at, as JSON: it works between different versions, and it says which
rank did not answer, which a collective cannot.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed as dist

from penstock.errors import PenstockError


class Answer(NamedTuple):
    """What a rank said.

    Attributes:
        value: as JSON holds it; None if it failed.
        trouble: why it failed; empty if it did not.
    """

    value: Any
    trouble: str


class Rounds:
    """One rank's view of the checks; every rank makes the same ones in the same order.

    Args:
        store: a ``torch.distributed`` store that all ranks see.
        rank, size: of this process.
        timeout: how long a rank may take for a check, in seconds.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self._store = dist.PrefixStore("penstock-doctor", store)  # type: ignore[attr-defined]  # torch does not annotate it
        self.rank, self.size, self.timeout = rank, size, timeout

    def each(self, name: str, job: Callable[[], Any]) -> list[Answer]:
        """Run a check on every rank, and give its answers by rank; whatever it raises is an answer, too.

        Raises:
            PenstockError: rank 0 did not collect them.
        """
        try:
            said = {"value": job(), "trouble": ""}
        except Exception as error:  # a failed check is what is looked for
            said = {"value": None, "trouble": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        self._store.set(f"{name}/{self.rank}", json.dumps(said))
        if self.rank == 0:
            answers = self._collect(name)
            self._store.set(f"{name}/all", json.dumps(answers))
        else:
            answers = self._read(f"{name}/all", 2 * self.timeout)
        if answers is None:
            raise PenstockError(
                f"rank 0 did not say within {2 * self.timeout:g} s how the check '{name}' went"
            )
        return [Answer(*answer) for answer in answers]

    def _collect(self, name: str) -> list[list[Any]]:
        deadline = time.monotonic() + self.timeout
        found: list[list[Any]] = []
        for rank in range(self.size):
            said = self._read(f"{name}/{rank}", max(0.05, deadline - time.monotonic()))
            if said is None:
                said = {"value": None, "trouble": f"did not answer within {self.timeout:g} s"}
            found.append([said["value"], said["trouble"]])
        return found

    def _read(self, key: str, timeout: float) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=timeout))
        except RuntimeError:  # the time is over, or the store has gone
            return None
        return json.loads(self._store.get(key))

    def leave(self) -> None:
        """Let rank 0, which may hold the store, go last."""
        self._store.set(f"left/{self.rank}", "true")
        if self.rank == 0:
            for rank in range(self.size):
                self._read(f"left/{rank}", min(self.timeout, 5.0))
