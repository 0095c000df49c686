"""Ranks that are threads of one process: values are handed over without a copy, through bounded channels.

A channel is two queues: one of messages, one of free places. A sender takes a place first, and waits if there is
none; the receiver gives it back. There are as many places as the Program's edge has capacity, so a training step
never waits for one and an evaluation cannot run ahead of its slowest rank.

On GPUs it is the host's side that is bounded so. The taker's thread goes on as soon as the message is there; its stream
waits for the value (see `streams`).
"""

from __future__ import annotations

import queue
from collections.abc import Sequence

from penstock.errors import PeerError, WaitTimeoutError
from penstock.runtime.health.rank_progress import WAITS, RankProgress, new_words
from penstock.runtime.transport.channel import Failure
from penstock.runtime.workers.streams import Events, Streams
from penstock.runtime.workers.timeout import Timeout
from penstock.schedule.program import Program
from penstock.stage.values import Message

_Messages = queue.SimpleQueue[tuple[int, Message | Failure]]
_Places = queue.SimpleQueue[Failure | None]


class ThreadChannel:
    """One rank's end of the edges between the threads of one process."""

    one_process = True

    def __init__(
        self, rank: int, timeout: Timeout, edges: dict[tuple[int, int], tuple[_Messages, _Places]]
    ) -> None:
        self.rank = rank
        self.timeout = timeout
        self.words: RankProgress = new_words()
        self.others: Sequence[RankProgress | None] = [self.words]
        self._out = {dst: edge for (src, dst), edge in edges.items() if src == rank}
        self._in = {src: edge for (src, dst), edge in edges.items() if dst == rank}
        self._aside: dict[tuple[int, int], Message] = {}  # by peer and tag

    def guilty(self, patience: float = 0.0) -> str | None:
        """No thread is gone: they end with their process."""
        return None

    def open(self, step: int) -> None:
        self._aside.clear()

    def send(self, peer: int, tag: int, message: Message) -> None:
        messages, places = self._out[peer]
        words = self.words
        words[WAITS] = peer + 1
        try:
            place = places.get(timeout=self.timeout.seconds)
        except queue.Empty:
            raise self._too_late(f"rank {peer} to take what was sent") from None
        words[WAITS] = 0
        if place is not None:
            raise PeerError(place.message, place)
        messages.put((tag, message))

    def recv(self, peer: int, tag: int) -> Message:
        if (peer, tag) in self._aside:
            return self._aside.pop((peer, tag))
        messages, places = self._in[peer]
        words = self.words
        words[WAITS] = peer + 1
        while True:
            try:
                arrived, content = messages.get(timeout=self.timeout.seconds)
            except queue.Empty:
                raise self._too_late(f"a message from rank {peer}") from None
            if isinstance(content, Failure):
                raise PeerError(content.message, content)
            places.put(None)
            if arrived == tag:
                words[WAITS] = 0
                return content
            self._aside[peer, arrived] = content

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
        return WaitTimeoutError(f"rank {self.rank} waited {self.timeout.seconds:g} s for {what}")


class StreamChannel(ThreadChannel):
    """The same where ranks compute on CUDA streams of their own.

    An event is recorded before its message is put, and the next time a step later, when its waits have been queued; so
    the taker finds the event of its own message, and one event a message is enough for all steps.
    """

    def __init__(
        self,
        rank: int,
        timeout: Timeout,
        edges: dict[tuple[int, int], tuple[_Messages, _Places]],
        streams: Streams,
        events: Events,
    ) -> None:
        super().__init__(rank, timeout, edges)
        self._streams = streams
        self._events = events

    def send(self, peer: int, tag: int, message: Message) -> None:
        self._streams.ready(self._events, self.rank, peer, tag, message)
        super().send(peer, tag, message)

    def recv(self, peer: int, tag: int) -> Message:
        message = super().recv(peer, tag)
        self._streams.arrive(self._events, peer, self.rank, tag, message)
        return message


def thread_channels(
    program: Program,
    timeout: Timeout,
    holders: Sequence[Sequence[int]] = (),
    streams: Streams | None = None,
) -> Sequence[ThreadChannel]:
    """The connected ends of a Program's ranks.

    Every rank is connected with every other: besides the Program's edges there is a place for the step's result, and
    one for the gradients of whatever both hold.

    Args:
        program: whose edges they are.
        timeout: of what a send or receive waits.
        holders: ranks that hold the same parameters and add up their gradients, by what they hold.
        streams: on which the ranks compute; None on the CPU.
    """
    ranks = range(program.schedule.ranks)
    edges: dict[tuple[int, int], tuple[_Messages, _Places]] = {}
    for source in ranks:
        for target in ranks:
            if source != target:
                edge = program.edges.get((source, target))
                places: _Places = queue.SimpleQueue()
                both = sum(source in group and target in group for group in holders)
                for _ in range((edge.capacity if edge else 0) + both + 1):
                    places.put(None)
                edges[source, target] = (queue.SimpleQueue(), places)
    events: Events = {}
    channels = [
        ThreadChannel(rank, timeout, edges)
        if streams is None
        else StreamChannel(rank, timeout, edges, streams, events)
        for rank in ranks
    ]
    for channel in channels:
        channel.others = [one.words for one in channels]
    return channels
