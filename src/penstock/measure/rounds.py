"""Checks that every rank makes and whose answers every rank gets, even before messages between ranks work.

The answers go as JSON through the store at which the processes met: that works between different versions, and shows which
rank did not answer, which a collective cannot do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed as dist

from penstock.base.errors import PenstockError, first_line


class Answer(NamedTuple):
    """One rank's answer to a check."""

    value: Any  # result of the check, as JSON holds it; None if it failed
    trouble: str


class Rounds:
    """One rank's view of the checks; every rank makes the same checks in the same order, each within `timeout` seconds."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self._store = dist.PrefixStore("penstock-doctor", store)  # type: ignore[attr-defined]  # torch does not annotate it
        self.rank, self.size, self.timeout = rank, size, timeout

    def each(self, name: str, job: Callable[[], Any]) -> list[Answer]:
        """Run a check on every rank, and return the answers by rank; an exception counts as an answer."""
        try:
            answer = {"value": job(), "trouble": ""}
        except Exception as error:  # a failed check is a result
            answer = {"value": None, "trouble": f"{type(error).__name__}: {first_line(error)}"}
        self._store.set(f"{name}/{self.rank}", json.dumps(answer))
        if self.rank == 0:
            answers = self._collect(name)
            self._store.set(f"{name}/all", json.dumps(answers))
        else:
            # Rank 0 may itself wait `timeout` for the slowest answer before it sends them.
            answers = self._read(f"{name}/all", 2 * self.timeout)
        if answers is None:
            raise PenstockError(
                f"rank 0 did not send the results of the check '{name}' within {2 * self.timeout:g} s"
            )
        return [Answer(*answer) for answer in answers]

    def _collect(self, name: str) -> list[list[Any]]:
        deadline = time.monotonic() + self.timeout
        answers: list[list[Any]] = []
        for rank in range(self.size):
            # After the deadline, answers that have arrived still count.
            answer = self._read(f"{name}/{rank}", max(0.05, deadline - time.monotonic()))
            if answer is None:
                answer = {"value": None, "trouble": f"did not answer within {self.timeout:g} s"}
            answers.append([answer["value"], answer["trouble"]])
        return answers

    def _read(self, key: str, timeout: float) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=timeout))
        except RuntimeError:  # the time is over, or the store is gone
            return None
        return json.loads(self._store.get(key))

    def leave(self) -> None:
        """Leave the checks; rank 0, which may host the store, waits for every rank."""
        self._store.set(f"left/{self.rank}", "true")
        if self.rank == 0:
            for rank in range(self.size):
                # A rank that failed never says that it leaves: it may not keep rank 0 for a whole timeout.
                self._read(f"left/{rank}", min(self.timeout, 5.0))
