"""Ranks that are threads of one process: values are handed over without a copy, through bounded channels.

A channel is two queues: one of messages, one of free places. A sender takes a place first, and waits if there is
none; the receiver gives it back. There are as many places as the Program's edge has capacity, so a training step
never waits for one and an evaluation cannot run ahead of its slowest rank.
"""

from __future__ import annotations

import queue

from penstock.errors import PeerError, WaitTimeoutError
from penstock.runtime.transport.base import Failure
from penstock.schedule.program import Program
from penstock.stage.values import Parcel

_Messages = queue.SimpleQueue[tuple[int, Parcel | Failure]]
_Places = queue.SimpleQueue[Failure | None]


class ThreadChannel:
    """One rank's end of the edges between the threads of one process."""

    def __init__(
        self, rank: int, timeout: float, edges: dict[tuple[int, int], tuple[_Messages, _Places]]
    ) -> None:
        self.rank = rank
        self.timeout = timeout
        self._out = {dst: edge for (src, dst), edge in edges.items() if src == rank}
        self._in = {src: edge for (src, dst), edge in edges.items() if dst == rank}
        self._aside: dict[int, Parcel] = {}

    def open(self, step: int) -> None:
        self._aside.clear()

    def send(self, peer: int, tag: int, parcel: Parcel) -> None:
        messages, places = self._out[peer]
        try:
            place = places.get(timeout=self.timeout)
        except queue.Empty:
            raise self._too_late(f"rank {peer} to take what was sent") from None
        if place is not None:
            raise PeerError(place.message, place)
        messages.put((tag, parcel))

    def recv(self, peer: int, tag: int) -> Parcel:
        if tag in self._aside:
            return self._aside.pop(tag)
        messages, places = self._in[peer]
        while True:
            try:
                arrived, content = messages.get(timeout=self.timeout)
            except queue.Empty:
                raise self._too_late(f"a message from rank {peer}") from None
            if isinstance(content, Failure):
                raise PeerError(content.message, content)
            places.put(None)
            if arrived == tag:
                return content
            self._aside[arrived] = content

    def fail(self, failure: Failure) -> None:
        for messages, _ in self._out.values():
            messages.put((-1, failure))
        for _, places in self._in.values():
            places.put(failure)

    def finish(self) -> None:
        assert not self._aside, f"messages nobody took: {sorted(self._aside)}"

    def close(self) -> None:
        self._aside.clear()

    def _too_late(self, what: str) -> WaitTimeoutError:
        return WaitTimeoutError(f"rank {self.rank} waited {self.timeout:g} s for {what}")


def thread_channels(program: Program, timeout: float) -> list[ThreadChannel]:
    """The connected ends of a Program's ranks.

    Every rank is connected with every other: besides the Program's edges there is a place for the step's result, and
    one for the gradients of each stage of which both hold a copy.

    Args:
        program: whose edges they are.
        timeout: the longest a send or receive waits, in seconds.
    """
    ranks = range(program.schedule.ranks)
    edges: dict[tuple[int, int], tuple[_Messages, _Places]] = {}
    for source in ranks:
        for target in ranks:
            if source != target:
                edge = program.edges.get((source, target))
                places: _Places = queue.SimpleQueue()
                both = sum(source in h and target in h for h in program.schedule.placement.holders)
                for _ in range((edge.capacity if edge else 0) + both + 1):
                    places.put(None)
                edges[source, target] = (queue.SimpleQueue(), places)
    return [ThreadChannel(rank, timeout, edges) for rank in ranks]
