"""Edges between processes of one machine: frames in shared memory, without a system call for each.

An edge is a ring of slots in a memory file. The sender writes a frame (see `wire`) into the next slot and then the slot's
sequence number; the receiver looks for that number. A large payload goes into a memory file of its own, which the
receiver uses as it is and which is free again when its tensors are gone. So a message is copied once.

A rank that waits looks for a moment, then says so in the ring and sleeps until the other rings its bell (a byte in a pipe),
until that process ends, or for a few milliseconds at the most, so that signals are handled and no wait is without limit.
Memory files and pipes have no names, and are opened through ``/proc``: nothing is left behind by a process that is killed.

Publishing the number last is enough on x86-64, whose stores become visible in order; on other machines these edges
are not used (`supported`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import stat
import struct
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.encoding import sendable
from penstock.errors import PeerError, TransportError, WaitTimeoutError
from penstock.runtime.health.peers import PeerRegistry, machine
from penstock.runtime.transport.channel import Failure
from penstock.runtime.transport.frame import (
    FAILURE,
    FRAME_BYTES,
    HEADER_BYTES,
    INLINE,
    LAYOUT,
    Header,
    Layout,
    LayoutBook,
    Views,
    aligned,
)
from penstock.runtime.workers.timeout import Timeout
from penstock.stage.values import Message

_TAKEN, _RECEIVER_SLEEPS, _SENDER_SLEEPS = 0, 8, 16  # places of the ring's counters, in 8-byte words
_RING_HEAD = 4096
_SLOT = HEADER_BYTES + FRAME_BYTES
_NAP = 2  # milliseconds; the longest sleep without a look
_LOOKS = 200  # looks before the first sleep, about 50 µs
_SEGMENT = struct.Struct("<qqq")  # number, file descriptor, bytes


@sendable
class Host(NamedTuple):
    """What tells whether two processes can share memory, and how to reach this one.

    Attributes:
        machine: equal for processes on one machine that see each other's process ids; empty if not supported.
        pid: the process.
        bell: descriptor of its pipe.
    """

    machine: str
    pid: int
    bell: int


class WakeSocket:
    """This process's pipe, by which others wake it, theirs, and the ends of their processes.

    Args:
        peer_registry: says who has ended, on whom everybody may wait at the end of a chain.
    """

    def __init__(self, peer_registry: PeerRegistry) -> None:
        self._peer_registry = peer_registry
        # The end for writing stays open, too: with none a pipe is always ready to be read.
        self._own, self._kept = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.host = Host(machine(), os.getpid(), self._own)
        self._others: dict[Host, int] = {}
        self._ends: dict[int, tuple[int, select.poll]] = {}
        # Looking without sleeping pays only where every rank has a core to itself.
        self.looks = _LOOKS

    def meet(self, host: Host) -> None:
        """Open another process's bell, while that process is known to live.

        Raises:
            OSError: it is hidden from this one, as in another container or by another user.
        """
        if host in self._others:
            return
        # For reading as well: writing to a pipe that nobody can read, its process being gone, would raise a signal.
        descriptor = os.open(f"/proc/{host.pid}/fd/{host.bell}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.ENXIO, "it is no bell", f"/proc/{host.pid}/fd/{host.bell}")
        self._others[host] = descriptor

    def ring(self, host: Host) -> None:
        """Wake another process that has been met; one that is awake or gone does not mind."""
        with contextlib.suppress(BlockingIOError):  # it has not heard the last 65,536 yet
            os.write(self._others[host], b"1")

    def wait(
        self,
        ready: Callable[[], bool],
        words: memoryview,
        sleeps: int,
        host: Host,
        timeout: float,
        peer: int,
        what: str,
    ) -> None:
        """Wait until `ready`.

        Args:
            ready: what is waited for.
            words: the ring's counters; the one at `sleeps` says that this process wants to be woken.
            sleeps: see above.
            host: who is waited for.
            timeout: in seconds.
            peer: the rank that is waited for.
            what: it is to do, for the error.

        Raises:
            PeerError: that process has ended, or another one without having closed its pipeline.
            WaitTimeoutError: the time is over.
        """
        for _ in range(self.looks):
            if ready():
                return
        deadline = time.monotonic() + timeout
        descriptor, poll = self._end_of(peer, host.pid)
        while True:
            words[sleeps] = 1
            if ready():
                words[sleeps] = 0
                return
            events = poll.poll(_NAP)
            words[sleeps] = 0
            if events:
                with contextlib.suppress(BlockingIOError):
                    while os.read(self._own, 4096):
                        pass
            if ready():
                return
            if any(fd == descriptor for fd, _ in events):
                raise PeerError(self._ended(peer, host.pid))
            self._peer_registry.require_all()
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"waited {timeout:g} s for rank {peer} to {what}")

    def _ended(self, peer: int, pid: int) -> str:
        return self._peer_registry.guilty() or f"rank {peer} has ended (process id {pid})"

    def close(self) -> None:
        """Close the pipes; may be called twice."""
        for descriptor in (*(end for end, _ in self._ends.values()), *self._others.values()):
            os.close(descriptor)
        self._ends.clear()
        self._others.clear()
        if self._own >= 0:
            os.close(self._own)
            os.close(self._kept)
            self._own = self._kept = -1

    def _end_of(self, peer: int, pid: int) -> tuple[int, select.poll]:
        if pid not in self._ends:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                raise PeerError(self._ended(peer, pid)) from None
            poll = select.poll()
            poll.register(self._own, select.POLLIN)
            poll.register(descriptor, select.POLLIN)
            self._ends[pid] = descriptor, poll
        return self._ends[pid]


class _Ring:
    """The memory of an edge: counters and slots."""

    def __init__(self, slots: int, path: str | None = None) -> None:
        self.slots = slots
        size = _RING_HEAD + slots * _SLOT
        self.descriptor = os.memfd_create("penstock-ring") if path is None else os.open(path, os.O_RDWR)
        if path is None:
            os.ftruncate(self.descriptor, size)
        memory = memoryview(mmap.mmap(self.descriptor, size))
        self.words = memory[:_RING_HEAD].cast("Q")
        starts = range(_RING_HEAD, size, _SLOT)
        self.numbers = [memory[s : s + 8].cast("Q") for s in starts]
        self.frames = [memory[s + HEADER_BYTES : s + _SLOT] for s in starts]
        self.views = [Views(torch.frombuffer(frame, dtype=torch.uint8)) for frame in self.frames]

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class _Segment:
    """Memory for one large payload. Its first byte is 1 while the receiver uses it."""

    def __init__(self, size: int, path: str | None = None) -> None:
        self.size = size
        self.descriptor = os.memfd_create("penstock-payload") if path is None else os.open(path, os.O_RDWR)
        if path is None:
            os.ftruncate(self.descriptor, HEADER_BYTES + size)
        self.map = mmap.mmap(self.descriptor, HEADER_BYTES + size)
        if path is not None:
            os.close(self.descriptor)
        self._lent: weakref.ref[Any] | None = None

    @property
    def free(self) -> bool:
        return self.map[0] == 0

    def payload(self) -> Tensor:
        """The bytes, for the sender to write."""
        return torch.frombuffer(memoryview(self.map)[HEADER_BYTES:], dtype=torch.uint8)

    def lend(self) -> Tensor:
        """The bytes, for the receiver to use; the segment is free again when no tensor refers to them."""
        block = (ctypes.c_ubyte * self.size).from_buffer(self.map, HEADER_BYTES)

        def back(_: weakref.ref[Any]) -> None:
            self.map[0] = 0

        self._lent = weakref.ref(block, back)
        return torch.frombuffer(block, dtype=torch.uint8)


class SharedOutgoing:
    """The sending end of an edge.

    Args:
        peer: the other rank.
        capacity: messages that can be under way.
        timeout: of what a send waits for a free slot.
        bell: of this process.
        host: where the receiver is.
    """

    def __init__(self, peer: int, capacity: int, timeout: Timeout, bell: WakeSocket, host: Host) -> None:
        self.peer, self.timeout, self.bell, self.host = peer, timeout, bell, host
        bell.meet(host)
        # One slot more than messages, so that word of a failure always finds one.
        self.ring = _Ring(capacity + 1)
        self._sent = 0
        self._book = LayoutBook()
        self._segments: list[_Segment] = []

    def offer(self) -> tuple[int, int]:
        """(descriptor, slots) by which the receiver finds the ring."""
        return self.ring.descriptor, self.ring.slots

    def send(self, step: int, tag: int, message: Message) -> None:
        number, layout, news = self._book.enter(message)
        start = aligned(HEADER_BYTES + len(news))
        if start + HEADER_BYTES > FRAME_BYTES:
            raise TransportError(
                f"the description of a value for rank {self.peer} takes {len(news)} bytes; at most "
                f"{FRAME_BYTES - 2 * HEADER_BYTES} fit: hand over fewer or shorter plain values"
            )
        size = layout.payload_bytes
        inline = start + size <= FRAME_BYTES
        ring, sent = self.ring, self._sent
        if sent - ring.words[_TAKEN] >= ring.slots - 1:
            self.bell.wait(
                lambda: sent - ring.words[_TAKEN] < ring.slots - 1,
                ring.words, _SENDER_SLEEPS, self.host, self.timeout.seconds, self.peer, "take what was sent",
            )  # fmt: skip
        slot = sent % ring.slots
        frame = ring.frames[slot]
        flags = (INLINE if inline else 0) | (LAYOUT if news else 0)
        Header(flags, step, tag, number, len(news), size).write(frame)
        if news:
            frame[HEADER_BYTES : HEADER_BYTES + len(news)] = news
        tensors = layout.leave(message)
        if inline:
            views = ring.views[slot].of(start, layout)
        else:
            at, segment = self._segment(size)
            _SEGMENT.pack_into(frame, start, at, segment.descriptor, segment.size)
            views = layout.views(segment.payload())
            segment.map[0] = 1
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
        self._publish(slot)

    def fail(self, failure: Failure) -> None:
        ring = self.ring
        if self._sent - ring.words[_TAKEN] >= ring.slots:
            return  # it has not even seen the last failure
        text = failure.message.encode()[: FRAME_BYTES - HEADER_BYTES]
        slot = self._sent % ring.slots
        Header(FAILURE, failure.step, failure.rank, 0, len(text), 0).write(ring.frames[slot])
        ring.frames[slot][HEADER_BYTES : HEADER_BYTES + len(text)] = text
        self._publish(slot)

    def wait_sent(self) -> None:
        """Nothing to wait for: what was sent has been copied."""

    def close(self) -> None:
        self.ring.close()
        for segment in self._segments:
            os.close(segment.descriptor)
        self._segments = []

    def _publish(self, slot: int) -> None:
        self._sent += 1
        self.ring.numbers[slot][0] = self._sent
        if self.ring.words[_RECEIVER_SLEEPS]:
            self.bell.ring(self.host)

    def _segment(self, size: int) -> tuple[int, _Segment]:
        for at, segment in enumerate(self._segments):
            if segment.free and segment.size >= size:
                return at, segment
        self._segments.append(_Segment(size))
        return len(self._segments) - 1, self._segments[-1]


class SharedIncoming:
    """The receiving end of an edge; its ring is the one that the sender offers."""

    def __init__(
        self, peer: int, timeout: Timeout, bell: WakeSocket, host: Host, offer: tuple[int, int]
    ) -> None:
        self.peer, self.timeout, self.bell, self.host = peer, timeout, bell, host
        bell.meet(host)
        descriptor, slots = offer
        self.ring = _Ring(slots, f"/proc/{host.pid}/fd/{descriptor}")
        self._taken = 0
        self._layouts: list[Layout] = []
        self._segments: dict[int, _Segment] = {}

    def next(self) -> tuple[int, int, Message | Failure]:
        """Wait for the next message on the edge: (step, tag, content)."""
        ring, wanted = self.ring, self._taken + 1
        slot = self._taken % ring.slots
        number = ring.numbers[slot]
        if number[0] != wanted:
            self.bell.wait(
                lambda: number[0] == wanted,
                ring.words, _RECEIVER_SLEEPS, self.host, self.timeout.seconds, self.peer, "send",
            )  # fmt: skip
        frame = ring.frames[slot]
        header = Header.read(frame)
        end = HEADER_BYTES + header.layout_bytes
        if header.flags & FAILURE:
            text = bytes(frame[HEADER_BYTES:end]).decode(errors="replace")
            self._release()
            return header.step, header.tag, Failure(header.tag, header.step, text)
        if header.flags & LAYOUT:
            if header.layout == 0:
                self._layouts.clear()
            self._layouts.append(Layout.from_bytes(bytes(frame[HEADER_BYTES:end])))
        layout = self._layouts[header.layout]
        start = aligned(end)
        if header.flags & INLINE:
            tensors = [view.clone() for view in ring.views[slot].of(start, layout)]
        else:
            at, descriptor, size = _SEGMENT.unpack_from(frame, start)
            if at not in self._segments:
                self._segments[at] = _Segment(size, f"/proc/{self.host.pid}/fd/{descriptor}")
            tensors = layout.views(self._segments[at].lend())
        self._release()
        return header.step, header.tag, layout.join(tensors)

    def close(self) -> None:
        self.ring.close()
        self._segments.clear()

    def _release(self) -> None:
        self._taken += 1
        self.ring.words[_TAKEN] = self._taken
        if self.ring.words[_SENDER_SLEEPS]:
            self.bell.ring(self.host)
