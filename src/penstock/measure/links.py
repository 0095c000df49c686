"""Latency and bandwidth of the links between ranks, measured over the edges that a run uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from penstock.base import host
from penstock.base.errors import PeerError, PenstockError, WaitTimeoutError
from penstock.runtime.health.hang import Timeout
from penstock.runtime.transport.processes import ProcessChannel
from penstock.runtime.workers.world import World
from penstock.stage.values import Message

BYTES = 4 << 20
"""Size of the message that measures the bandwidth."""

ALONE = 8
"""Up to so many ranks, one pair is measured at a time; with more, all pairs without a common rank at once."""

# Round trips: small messages to warm up, then the small and the large ones that are measured.
_WARM, _TRIPS, _LARGE = 5, 25, 3
_PING, _PONG = 1, 2


def pairs(size: int) -> list[list[tuple[int, int]]]:
    """Return every pair of ranks once, in rounds of pairs without a common rank (the circle method of tournaments)."""
    seats: list[int | None] = list(range(size)) + [None] * (size % 2)
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        disjoint = [
            (min(a, b), max(a, b))
            for a, b in zip(seats[:half], reversed(seats[half:]), strict=True)
            if a is not None and b is not None
        ]
        rounds += [[pair] for pair in disjoint] if size <= ALONE else [disjoint]
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measure(world: World, timeout: float) -> dict[str, Any]:
    """Measure all links of this rank; every rank calls it.

    ``links`` has for every other rank ``to``, ``way``, ``latency`` (seconds, half a round trip) and ``bandwidth``
    (bytes a second, from this rank to the other), or ``trouble``; ``open_files`` is the number of open files with all
    links.
    """
    others = [rank for rank in range(world.size) if rank != world.rank]
    links: list[dict[str, Any]] = []
    with Edges(world, dict.fromkeys(others, (2, 2)), timeout) as channel:
        ways = channel.ways
        for number, at_once in enumerate(pairs(world.size), 1):
            channel.open(number)
            for pair in at_once:
                if world.rank in pair:
                    peer = pair[0] if world.rank == pair[1] else pair[1]
                    links.append(
                        {"to": peer, "way": ways[peer], **_measure_pair(channel, peer, world.rank < peer)}
                    )
            world.gather(None)  # no rank begins the next one before all have finished this one
        files = host.open_files()
    return {"links": sorted(links, key=lambda link: int(link["to"])), "open_files": files}


def _measure_pair(channel: ProcessChannel, peer: int, first: bool) -> dict[str, Any]:
    try:
        there = round_trips(channel, peer, torch.zeros(1), _WARM, _TRIPS, first)
        latency = statistics.median(there) / 2
        large = torch.zeros(BYTES, dtype=torch.uint8)
        mine = round_trips(channel, peer, large, 1, _LARGE, first)
        theirs = round_trips(channel, peer, large, 1, _LARGE, not first)
        channel.finish()
    except PenstockError as error:
        return {"trouble": str(error)}
    took = statistics.median(mine if first else theirs)
    return {"latency": latency, "bandwidth": BYTES / max(took - latency, 1e-9)}


def round_trips(
    channel: ProcessChannel, peer: int, payload: torch.Tensor, warm: int, trips: int, first: bool
) -> list[float]:
    """Return seconds of round trips with a short answer; the second rank measures from one answer to the next."""
    times = []
    answer = Message((torch.zeros(1),))
    for trip in range(warm + trips):
        began = time.perf_counter()
        if first:
            channel.send(peer, _PING, Message((payload,)))
            channel.recv(peer, _PONG)
        else:
            channel.recv(peer, _PING)
            channel.send(peer, _PONG, answer)
        if trip >= warm:
            times.append(time.perf_counter() - began)
    return times


def unanswered(world: World, timeout: float, opening: float) -> float:
    """Wait for a message that is never sent, and return how long that took in seconds; every rank calls it.

    All ranks have to connect within `opening` seconds, and the wait has to end after `timeout` seconds.
    """
    last, following = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    with Edges(world, {last: (1, 1), following: (1, 1)}, opening, timeout) as channel:
        channel.open(1)
        began = time.perf_counter()
        try:
            channel.recv(last, _PING)
        except (WaitTimeoutError, PeerError):  # gloo breaks it where a rank's wait ends a moment earlier
            took = time.perf_counter() - began
        else:
            raise PenstockError(f"received a message from rank {last}, which sent none")
        world.gather(None)  # no rank leaves, which would end the wait of another
    return took


class Edges:
    """Context manager of edges to and from some ranks, in a separate process group.

    `peers` has slots and capacity of the edges of each rank. All ranks have to connect within `timeout` seconds, and
    a message may take `wait` seconds (default: `timeout`).
    """

    def __init__(
        self, world: World, peers: dict[int, tuple[int, int]], timeout: float, wait: float | None = None
    ) -> None:
        self._world, self._peers, self._timeout = world, peers, timeout
        self._wait = timeout if wait is None else wait

    def __enter__(self) -> ProcessChannel:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout))
        exchange: Callable[[Any], list[Any]] = self._world.gather
        self._channel = ProcessChannel(
            self._group, exchange, incoming=self._peers, outgoing=self._peers, timeout=Timeout(self._wait)
        )
        return self._channel

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        dist.destroy_process_group(self._group)
