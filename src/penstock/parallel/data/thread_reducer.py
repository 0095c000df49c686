"""Replicas that are threads of one process: sums in the order of the replicas, so that they are the same every time.

Every replica puts its buffer down; the last to come adds all of them up and fills in everybody's. Starting therefore
never waits, however many are under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PeerError, WaitTimeoutError
from penstock.parallel.data.reducer import Handle, part_of


class _Meeting:
    """One collective: what every replica brought, and whether it is done."""

    def __init__(self, size: int) -> None:
        self.brought: list[Any] = [None] * size
        self.missing = size
        self.done = threading.Event()
        self.summed = False
        self.ready: list[torch.cuda.Event] = []
        self.end: torch.cuda.Event | None = None
        self.error: BaseException | None = None


class _Table:
    """What the threads share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.meetings: dict[int, _Meeting] = {}
        self.failure: str | None = None

    def fail(self, message: str) -> None:
        with self.lock:
            if self.failure is None:
                self.failure = message
            waiting = list(self.meetings.values())
        for meeting in waiting:
            meeting.done.set()

    def bring(
        self, number: int, rank: int, value: Any, flat: Tensor | None, act: Callable[[list[Any]], None]
    ) -> _Meeting:
        with self.lock:
            meeting = self.meetings.setdefault(number, _Meeting(self.size))
            meeting.brought[rank] = value
            if flat is not None and flat.is_cuda:
                meeting.ready.append(torch.cuda.current_stream(flat.device).record_event())
            meeting.missing -= 1
            if meeting.missing or self.failure is not None:
                return meeting
            del self.meetings[number]
        try:
            with torch.no_grad():
                if flat is not None and flat.is_cuda:
                    stream = torch.cuda.current_stream(flat.device)
                    for event in meeting.ready:
                        stream.wait_event(event)
                    act(meeting.brought)
                    meeting.end = stream.record_event()
                else:
                    act(meeting.brought)
            meeting.summed = True
        except Exception as error:
            meeting.error = error
        meeting.ready.clear()
        meeting.done.set()
        return meeting


class ThreadReducer:
    """One replica's end; made by `thread_reducers`."""

    def __init__(self, rank: int, table: _Table, timeout: float) -> None:
        self.rank = rank
        self.size = table.size
        self.timeout = timeout
        self._table = table
        self._count = 0

    def start(self, flat: Tensor) -> Handle:
        return self._bring(flat, flat, _add_up)

    def scatter(self, flat: Tensor) -> Handle:
        return self._bring(flat, flat, _add_up_parts)

    def gather(self, flat: Tensor) -> Handle:
        return self._bring(flat, flat, _fill_in)

    def set_timeout(self, seconds: float) -> None:
        self.timeout = seconds

    def exchange(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        handle = self._bring(numbers, None, lambda brought: None)

        def result() -> list[list[int]]:
            handle.wait()
            return list(handle.meeting.brought)

        return result

    def share(self, value: object) -> list[Any]:
        handle = self._bring(value, None, lambda brought: None)
        handle.wait()
        return list(handle.meeting.brought)

    def fail(self, message: str) -> None:
        """Tell every replica that this one failed: whatever they wait for raises `PeerError`, now and later."""
        self._table.fail(f"replica {self.rank} failed: {message}")

    def _bring(self, value: Any, flat: Tensor | None, act: Callable[[list[Any]], None]) -> _Coming:
        number, self._count = self._count, self._count + 1
        return _Coming(self, self._table.bring(number, self.rank, value, flat, act), flat)


class _Coming:
    __slots__ = ("flat", "meeting", "reducer")

    def __init__(self, reducer: ThreadReducer, meeting: _Meeting, flat: Tensor | None) -> None:
        self.reducer, self.meeting, self.flat = reducer, meeting, flat

    def wait(self) -> None:
        meeting, reducer = self.meeting, self.reducer
        table = reducer._table
        if table.failure is None and not meeting.done.wait(reducer.timeout):
            absent = [r for r, value in enumerate(meeting.brought) if value is None]
            raise WaitTimeoutError(
                f"replica {reducer.rank} waited {reducer.timeout:g} s for replica(s) {absent}; "
                "they failed, are slow, or left out a step"
            )
        if meeting.error is not None:
            raise PeerError(f"the replicas' sum failed: {meeting.error}") from meeting.error
        if not meeting.summed:
            raise PeerError(str(table.failure))
        if meeting.end is not None and self.flat is not None:
            torch.cuda.current_stream(self.flat.device).wait_event(meeting.end)


def thread_reducers(size: int, timeout: float = 60.0) -> list[ThreadReducer]:
    """The connected ends of `size` replicas, one for each thread.

    Args:
        size: how many replicas.
        timeout: the longest a wait may last, in seconds.
    """
    table = _Table(size)
    return [ThreadReducer(rank, table, timeout) for rank in range(size)]


def _add_up(flats: Sequence[Tensor]) -> None:
    total = flats[0]
    for flat in flats[1:]:
        total.add_(flat)
    for flat in flats[1:]:
        flat.copy_(total)


def _add_up_parts(flats: Sequence[Tensor]) -> None:
    size = len(flats)
    for rank, flat in enumerate(flats):
        total = part_of(flats[0], rank, size).clone()
        for other in flats[1:]:
            total += part_of(other, rank, size)
        part_of(flat, rank, size).copy_(total)


def _fill_in(flats: Sequence[Tensor]) -> None:
    size = len(flats)
    for rank, flat in enumerate(flats):
        for other in flats:
            if other is not flat:
                part_of(other, rank, size).copy_(part_of(flat, rank, size))
