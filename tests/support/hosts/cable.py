"""The network between hosts: an Ethernet switch between TAP devices, whose links have delay, loss and a rate, or are cut.

A process of its own, started with the descriptor of a socket. Each packet on it has the settings of all links, or with a
descriptor the end of one more network card; each is answered once it counts. Only the standard library, so that it starts
at once.

The kernel's own ``netem`` does the same, where it was built in; this needs no more than ``/dev/net/tun``.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import socket
import sys
import time
from contextlib import suppress

FRAME = 1 << 16
QUEUE = 0.25
"""Seconds of its rate that a link stores; what does not fit is dropped, as by a switch."""
PREFIX = b"\x02\x00\x00\x00"
"""First bytes of a card's address; the network and the host follow."""
_AT_ONCE = 64  # frames of a card before the others have their turn

Card = tuple[int, int]
"""Number of the network, and of the host."""


def address(network: int, host: int) -> bytes:
    """The hardware address of a host's card in a network."""
    return PREFIX + bytes((network, host))


class Link:
    """From one host to another: seconds of delay and jitter, share of frames lost, bytes a second, whether it is cut."""

    def __init__(
        self, delay: float = 0, jitter: float = 0, loss: float = 0, rate: float = 0, cut: bool = False
    ) -> None:
        self.delay, self.jitter, self.loss, self.rate, self.cut = delay, jitter, loss, rate, cut
        self.free_at = 0.0

    def due(self, now: float, size: int) -> float | None:
        """When a frame arrives that is sent now; None if it does not."""
        if self.cut or (self.loss and random.random() < self.loss):
            return None
        if self.rate:
            start = max(self.free_at, now)
            if start - now > QUEUE:
                return None
            now = self.free_at = start + size / self.rate
        return now + self.delay + (random.random() * self.jitter if self.jitter else 0.0)


class Switch:
    """Cards, the links between them, and the frames under way."""

    def __init__(self) -> None:
        self.cards: dict[Card, int] = {}
        self.owners: dict[int, Card] = {}
        self.links: dict[tuple[int, int, int], Link] = {}
        self._under_way: list[tuple[float, int, Card, Link, bytes]] = []
        self._order = 0

    def plug(self, card: Card, descriptor: int) -> None:
        """Take a card's descriptor, in place of the card that the host had before."""
        if card in self.cards:
            self.unplug(self.cards[card])
        os.set_blocking(descriptor, False)
        self.cards[card], self.owners[descriptor] = descriptor, card

    def unplug(self, descriptor: int) -> None:
        del self.cards[self.owners.pop(descriptor)]
        os.close(descriptor)

    def take(self, descriptor: int) -> None:
        """Take what a card sends, until it has no more."""
        network, sender = self.owners[descriptor]
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(descriptor, FRAME)
            except BlockingIOError:
                return
            except OSError:  # its host is gone
                self.unplug(descriptor)
                return
            if frame[:5] == PREFIX + bytes((network,)):
                self._send(network, sender, frame[5], frame)
            elif frame[0] & 1:
                for other, receiver in list(self.cards):
                    if other == network and receiver != sender:
                        self._send(network, sender, receiver, frame)

    def _send(self, network: int, sender: int, receiver: int, frame: bytes) -> None:
        link = self.links.setdefault((network, sender, receiver), Link())
        due = link.due(time.monotonic(), len(frame))
        if due is not None:
            self._order += 1
            heapq.heappush(self._under_way, (due, self._order, (network, receiver), link, frame))

    def deliver(self) -> float | None:
        """Deliver what is due; return the seconds until the next frame is, None if there is none."""
        while self._under_way:
            left = self._under_way[0][0] - time.monotonic()
            if left > 0:
                return left
            _, _, card, link, frame = heapq.heappop(self._under_way)
            if not link.cut and card in self.cards:
                with suppress(OSError):  # the card is down, or its queue full
                    os.write(self.cards[card], frame)
        return None


def serve(control: socket.socket) -> None:
    """Switch frames until the other end of the socket is closed."""
    switch = Switch()
    while True:
        wait = switch.deliver()
        ready, _, _ = select.select([control, *switch.owners], [], [], wait)
        for one in ready:
            if one is control:
                data, descriptors, _, _ = socket.recv_fds(control, FRAME, 1)
                if not data:
                    return
                told = json.loads(data)
                if descriptors:
                    switch.plug(tuple(told), descriptors[0])
                else:
                    switch.links = {tuple(key): Link(**values) for key, values in told}
                control.send(b"done")
            elif one in switch.owners:
                switch.take(one)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
