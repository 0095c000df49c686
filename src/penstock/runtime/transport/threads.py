"""Ranks that are threads of one process: values are passed on without a copy, through bounded channels.

A channel is two queues: one of messages, one of free places. A sender takes a place first, and waits if there is none; the
receiver returns it. There are as many places as the Program's edge has capacity, so a training step never waits for one, and
an evaluation cannot run far ahead of its slowest rank.

On GPUs only the host's side is bounded: the receiving thread continues as soon as the message arrives, and its stream waits
for the value (see `streams`). Where the ranks have different devices, the receiver copies the message to its own.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence

import torch

from penstock.base.errors import PeerError, WaitTimeoutError
from penstock.runtime.health.hang import Timeout
from penstock.runtime.health.rank_progress import WAITS, RankProgress, new_progress
from penstock.runtime.transport.channel import Failure
from penstock.runtime.transport.streams import Events, Streams
from penstock.schedule.program import Program
from penstock.stage.values import Message

_Messages = queue.SimpleQueue[tuple[int, Message | Failure]]
_Places = queue.SimpleQueue[Failure | None]


class ThreadChannel:
    """One rank's end of the edges between the threads of one process.

    Args:
        devices: device of each rank, where they differ (default none).
    """

    one_process = True

    def __init__(
        self,
        rank: int,
        timeout: Timeout,
        edges: dict[tuple[int, int], tuple[_Messages, _Places]],
        devices: Sequence[torch.device] = (),
    ) -> None:
        self.rank = rank
        self._devices = devices
        self.timeout = timeout
        self.progress: RankProgress = new_progress()
        self.all_progress: Sequence[RankProgress | None] = [self.progress]
        self.hosts: Sequence[str] = ()
        self._out = {dst: edge for (src, dst), edge in edges.items() if src == rank}
        self._in = {src: edge for (src, dst), edge in edges.items() if dst == rank}
        self._aside: dict[tuple[int, int], Message] = {}  # by peer and tag

    def find_failed(self, patience: float = 0.0) -> str | None:
        """Return None, since threads end only with their process."""
        return None

    def open(self, step: int, trains: bool = True, microbatches: int = 0) -> None:
        self._aside.clear()

    def send(self, peer: int, tag: int, message: Message) -> None:
        messages, places = self._out[peer]
        self.progress[WAITS] = peer + 1
        try:
            place = places.get(timeout=self.timeout.seconds)
        except queue.Empty:
            raise self._timeout_error(f"rank {peer} to receive earlier messages") from None
        self.progress[WAITS] = 0
        if place is not None:
            raise PeerError(place.message, place)
        messages.put((tag, message))

    def recv(self, peer: int, tag: int) -> Message:
        if (peer, tag) in self._aside:
            return self._arrived(peer, tag, self._aside.pop((peer, tag)))
        messages, places = self._in[peer]
        self.progress[WAITS] = peer + 1
        while True:
            try:
                arrived, content = messages.get(timeout=self.timeout.seconds)
            except queue.Empty:
                raise self._timeout_error(f"a message from rank {peer}") from None
            if isinstance(content, Failure):
                raise PeerError(content.message, content)
            places.put(None)
            if arrived == tag:
                self.progress[WAITS] = 0
                return self._arrived(peer, tag, content)
            self._aside[peer, arrived] = content

    def _arrived(self, peer: int, tag: int, message: Message) -> Message:
        """Return a message on this rank's device."""
        return message.moved(self._devices[self.rank], self._devices[peer]) if self._devices else message

    def fail(self, failure: Failure) -> None:
        # In place of a message for ranks that wait to receive, and of a free place for ranks that wait to send.
        for messages, _ in self._out.values():
            messages.put((-1, failure))
        for _, places in self._in.values():
            places.put(failure)

    def drain(self, senders: Sequence[int]) -> None:
        """Do nothing: a rank that waits to send has the notice."""

    def finish(self) -> None:
        assert not self._aside, f"messages that were never taken: {sorted(self._aside)}"

    def close(self) -> None:
        self._aside.clear()

    def _timeout_error(self, awaited: str) -> WaitTimeoutError:
        return WaitTimeoutError(f"rank {self.rank} waited {self.timeout.seconds:g} s for {awaited}")


class StreamChannel(ThreadChannel):
    """One rank's end of the edges where each rank computes on its own CUDA stream.

    An event is recorded before its message is put, and again only a step later, when its waits have been queued. So the
    receiver always waits for its own message, and one event for each message of a step is enough for all steps.
    """

    def __init__(
        self,
        rank: int,
        timeout: Timeout,
        edges: dict[tuple[int, int], tuple[_Messages, _Places]],
        devices: Sequence[torch.device],
        streams: Streams,
        events: Events,
    ) -> None:
        super().__init__(rank, timeout, edges, devices)
        self._streams = streams
        self._events = events

    def send(self, peer: int, tag: int, message: Message) -> None:
        self._streams.record_event(self._events, self.rank, peer, tag, message)
        super().send(peer, tag, message)

    def _arrived(self, peer: int, tag: int, message: Message) -> Message:
        self._streams.wait_event(self._events, peer, self.rank, tag, message)
        return super()._arrived(peer, tag, message)


def thread_channels(
    program: Program,
    timeout: Timeout,
    holders: Sequence[Sequence[int]] = (),
    streams: Streams | None = None,
    devices: Sequence[torch.device] = (),
) -> Sequence[ThreadChannel]:
    """Return the connected channels of a Program's ranks.

    Every rank is connected with every other: besides the places of the Program's edges there is one for the step's result,
    and one for the gradients of each group that both ranks are in.
    """
    ranks = range(program.schedule.ranks)
    edges: dict[tuple[int, int], tuple[_Messages, _Places]] = {}
    for source in ranks:
        for target in ranks:
            if source != target:
                edge = program.edges.get((source, target))
                places: _Places = queue.SimpleQueue()
                common = sum(source in group and target in group for group in holders)
                for _ in range((edge.capacity if edge else 0) + common + 1):
                    places.put(None)
                edges[source, target] = (queue.SimpleQueue(), places)
    events: Events = {}
    channels = [
        ThreadChannel(rank, timeout, edges, devices)
        if streams is None
        else StreamChannel(rank, timeout, edges, devices, streams, events)
        for rank in ranks
    ]
    for channel in channels:
        channel.all_progress = [other.progress for other in channels]
    return channels
