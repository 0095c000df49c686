"""A communicator of replicas that are threads; it sums in the order of the replicas, so that results are reproducible.

Every replica registers its buffer; the last one to come computes the sums and writes them to all buffers. So beginning a
collective never waits, however many are in progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PeerError, WaitTimeoutError
from penstock.parallel.data.reducer import Handle, part_of


class _Collective:
    """One collective of all replicas: their values, and its state."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.missing = size
        self.done = threading.Event()
        self.succeeded = False
        self.ready: list[torch.cuda.Event] = []
        self.end: torch.cuda.Event | None = None
        self.error: BaseException | None = None


class _Communicator:
    """State shared by the threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.collectives: dict[int, _Collective] = {}
        self.failure: str | None = None

    def fail(self, message: str) -> None:
        with self.lock:
            if self.failure is None:
                self.failure = message
            pending = list(self.collectives.values())
        for collective in pending:
            collective.done.set()

    def join(
        self, number: int, rank: int, value: Any, flat: Tensor | None, compute: Callable[[list[Any]], None]
    ) -> _Collective:
        with self.lock:
            collective = self.collectives.setdefault(number, _Collective(self.size))
            collective.values[rank] = value
            if flat is not None and flat.is_cuda:
                collective.ready.append(torch.cuda.current_stream(flat.device).record_event())
            collective.missing -= 1
            if collective.missing or self.failure is not None:
                return collective
            del self.collectives[number]
        try:
            with torch.no_grad():
                if flat is not None and flat.is_cuda:
                    stream = torch.cuda.current_stream(flat.device)
                    for event in collective.ready:
                        stream.wait_event(event)
                    compute(collective.values)
                    collective.end = stream.record_event()
                else:
                    compute(collective.values)
            collective.succeeded = True
        except Exception as error:
            collective.error = error
        collective.ready.clear()
        collective.done.set()
        return collective


class ThreadReducer:
    """One replica's end of the communicator; made by `thread_reducers`."""

    def __init__(self, rank: int, communicator: _Communicator, timeout: float) -> None:
        self.rank = rank
        self.size = communicator.size
        self.timeout = timeout
        self._communicator = communicator
        self._count = 0

    def all_reduce(self, flat: Tensor) -> Handle:
        return self._join(flat, flat, _all_reduce)

    def reduce_scatter(self, flat: Tensor) -> Handle:
        return self._join(flat, flat, _reduce_scatter)

    def all_gather(self, flat: Tensor) -> Handle:
        return self._join(flat, flat, _all_gather)

    def set_timeout(self, seconds: float) -> None:
        self.timeout = seconds

    def exchange(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        handle = self._join(numbers, None, lambda values: None)

        def result() -> list[list[int]]:
            handle.wait()
            return list(handle.collective.values)

        return result

    def all_gather_object(self, value: object) -> list[Any]:
        handle = self._join(value, None, lambda values: None)
        handle.wait()
        return list(handle.collective.values)

    def fail(self, message: str) -> None:
        """Report that this replica failed: all waits of the others raise `PeerError`, now and later."""
        self._communicator.fail(f"replica {self.rank} failed: {message}")

    def _join(self, value: Any, flat: Tensor | None, compute: Callable[[list[Any]], None]) -> _Handle:
        number, self._count = self._count, self._count + 1
        return _Handle(self, self._communicator.join(number, self.rank, value, flat, compute), flat)


class _Handle:
    __slots__ = ("collective", "flat", "reducer")

    def __init__(self, reducer: ThreadReducer, collective: _Collective, flat: Tensor | None) -> None:
        self.reducer, self.collective, self.flat = reducer, collective, flat

    def wait(self) -> None:
        collective, reducer = self.collective, self.reducer
        communicator = reducer._communicator
        if communicator.failure is None and not collective.done.wait(reducer.timeout):
            absent = [r for r, value in enumerate(collective.values) if value is None]
            raise WaitTimeoutError(
                f"replica {reducer.rank} waited {reducer.timeout:g} s for replica(s) {absent}; "
                "they failed, are slow, or left out a step"
            )
        if collective.error is not None:
            raise PeerError(f"the replicas' sum failed: {collective.error}") from collective.error
        if not collective.succeeded:
            raise PeerError(str(communicator.failure))
        if collective.end is not None and self.flat is not None:
            torch.cuda.current_stream(self.flat.device).wait_event(collective.end)


def thread_reducers(size: int, timeout: float = 60.0) -> list[ThreadReducer]:
    """Return the connected reducers of `size` replicas, one for each thread.

    Args:
        size: number of replicas, one a thread.
        timeout: seconds that a wait may last (default 60).
    """
    communicator = _Communicator(size)
    return [ThreadReducer(rank, communicator, timeout) for rank in range(size)]


def _all_reduce(flats: Sequence[Tensor]) -> None:
    total = flats[0]
    for flat in flats[1:]:
        total.add_(flat)
    for flat in flats[1:]:
        flat.copy_(total)


def _reduce_scatter(flats: Sequence[Tensor]) -> None:
    size = len(flats)
    for rank, flat in enumerate(flats):
        total = part_of(flats[0], rank, size).clone()
        for other in flats[1:]:
            total += part_of(other, rank, size)
        part_of(flat, rank, size).copy_(total)


def _all_gather(flats: Sequence[Tensor]) -> None:
    size = len(flats)
    for rank, flat in enumerate(flats):
        for other in flats:
            if other is not flat:
                part_of(other, rank, size).copy_(part_of(flat, rank, size))
