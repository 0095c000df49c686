"""Threads in the place of the processes of an axis: what these would send each other goes over memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import PenstockError
from penstock.parallel.context.attention import Finish, Masks, SequencePart


class Line:
    """Threads with ranks, which all exchange the same things in the same order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: list[Any] = [None] * size
        self._barrier = Barrier(size)

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Give all a value, and return what each has given, by rank."""
        self._given[rank] = value
        self._barrier.wait(60)
        every = [*self._given]
        self._barrier.wait(60)  # before anyone gives the next one
        return every

    def run(self, job: Callable[[int], Any]) -> list[Any]:
        """Return what a job returns on each rank, or the error of ours that it raises."""

        def run(rank: int) -> Any:
            try:
                return job(rank)
            except PenstockError as error:
                return error

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(run, range(self.size)))


class SampleExchange:
    """The exchange of a thread with those that have the other tokens of its samples."""

    def __init__(self, line: Line, rank: int, microbatches: int = 1) -> None:
        self.masks: Masks = {}
        self.microbatches = microbatches
        self._line, self._rank = line, rank

    def start_gather(self, part: Tensor) -> Finish:
        every = self._line.swap(self._rank, part.clone())
        return lambda: torch.stack(every)

    def start_sum(self, whole: Tensor) -> tuple[Tensor, Finish]:
        total = sum(each[self._rank] for each in self._line.swap(self._rank, whole.clone()))
        return total, lambda: total


def on_parts(
    parts: int, job: Callable[[SequencePart, SampleExchange], Any], microbatches: int = 1
) -> list[Any]:
    """Return what a job returns, or raises, in each of the threads that divide samples."""
    line = Line(parts)
    return line.run(lambda rank: job(SequencePart(rank, parts), SampleExchange(line, rank, microbatches)))
