"""Edges between processes of one machine: frames in shared memory, without a system call for each.

An edge is a ring of slots in a memory file. The sender writes a frame (see `frame`) into the next slot and then the slot's
sequence number, which the receiver polls. A large payload goes into a separate memory file, which the receiver uses in place
and which is free again once its tensors are gone. So a message is copied once. A ring that becomes too small is left for a
larger one, which its last frame names.

A rank that waits spins for a moment. Then it sets a flag in the ring and sleeps until the other process wakes it (by a byte
in a pipe) or ends, or for a few milliseconds at most, so that signals are handled and every wait has a timeout. Memory files
and pipes have no names and are opened through ``/proc``, so a killed process leaves nothing behind.

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

from penstock.base.encoding import sendable
from penstock.base.errors import PeerError, WaitTimeoutError
from penstock.runtime.health.hang import Timeout
from penstock.runtime.health.peers import PeerRegistry, machine
from penstock.runtime.transport.channel import Failure
from penstock.runtime.transport.frame import (
    FRAME_BYTES,
    HEADER_BYTES,
    INLINE,
    LAYOUT,
    MOVED,
    NOTICE,
    Header,
    ReceivedLayouts,
    SentLayouts,
    Views,
    aligned,
    read_notice,
    require_fits,
    write_notice,
)
from penstock.stage.values import Message

# A cache line apart: two processes write them, and in one line each write would cost the other a miss.
_TAKEN, _RECEIVER_SLEEPS, _SENDER_SLEEPS = 0, 8, 16  # indices of the ring's counters, in 8-byte words
_RING_HEAD = 4096
_SLOT = HEADER_BYTES + FRAME_BYTES
_POLL_INTERVAL = 2  # milliseconds; the longest sleep
_SPINS = 200  # polls before the first sleep, about 50 µs
_SEGMENT = struct.Struct("<qqq")  # number, file descriptor, bytes


@sendable
class Host(NamedTuple):
    """Address of a process for edges in shared memory."""

    machine: str
    pid: int
    pipe: int


class WakePipe:
    """The pipe by which other processes wake this one, their pipes, and descriptors that tell when they end."""

    def __init__(self, peer_registry: PeerRegistry) -> None:
        self._peer_registry = peer_registry
        # The write end stays open, too, since a pipe without one always polls as readable.
        # Linux alone has it.
        self._own, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # type: ignore[attr-defined, unused-ignore]
        self.host = Host(machine(), os.getpid(), self._own)
        self._pipes: dict[Host, int] = {}
        self._processes: dict[int, tuple[int, select.poll]] = {}
        # Spinning pays only where every rank has its own core; 0 elsewhere.
        self.spins = _SPINS

    def connect(self, host: Host) -> None:
        """Open another process's pipe while that process is known to live."""
        if host in self._pipes:
            return
        # For reading as well: writing to a pipe without a reader, once its process is gone, would raise a signal.
        path = f"/proc/{host.pid}/fd/{host.pipe}"
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.ENXIO, "not a pipe", path)
        self._pipes[host] = descriptor

    def wake(self, host: Host) -> None:
        """Wake a connected process; has no effect if it is awake or gone."""
        with contextlib.suppress(BlockingIOError):  # it has not read the last 65,536 bytes yet
            os.write(self._pipes[host], b"1")

    def wait(
        self,
        ready: Callable[[], bool],
        counters: memoryview,
        *,
        sleeps: int,
        host: Host,
        timeout: float,
        peer: int,
        action: str,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Wait until ``ready()`` is true.

        Args:
            sleeps: index of the counter that asks the other process to wake this one.
            action: action awaited from rank `peer`, as an infinitive, for the error.
        """
        for _ in range(self.spins):
            if ready():
                return
        deadline = time.monotonic() + timeout
        process, poll = self._poll_of(peer, host.pid)
        while True:
            counters[sleeps] = 1
            # Once more, since the other process may have written before it could see the flag.
            if ready():
                counters[sleeps] = 0
                return
            events = poll.poll(_POLL_INTERVAL)
            counters[sleeps] = 0
            if events:
                with contextlib.suppress(BlockingIOError):
                    while os.read(self._own, 4096):
                        pass
            if ready():
                return
            if any(descriptor == process for descriptor, _ in events):
                raise self._ended(peer, host.pid)
            self._peer_registry.require_all()
            if check is not None:
                check()
            # What it has sent in this step is there by now. Its notice may have found no place behind earlier ones.
            if (left := self._peer_registry.left_step(peer)) is not None and not ready():
                raise left
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"waited {timeout:g} s for rank {peer} to {action}")

    def _ended(self, peer: int, pid: int) -> PeerError:
        return PeerError(self._peer_registry.find_failed() or f"rank {peer} has ended (process id {pid})")

    def close(self) -> None:
        """Close the pipes; may be called twice."""
        for descriptor in (*(process for process, _ in self._processes.values()), *self._pipes.values()):
            os.close(descriptor)
        self._processes.clear()
        self._pipes.clear()
        if self._own >= 0:
            os.close(self._own)
            os.close(self._write_end)
            self._own = self._write_end = -1

    def _poll_of(self, peer: int, pid: int) -> tuple[int, select.poll]:
        """Return a process's descriptor, and a poll of it and this process's pipe."""
        if pid not in self._processes:
            try:
                descriptor = os.pidfd_open(pid)  # type: ignore[attr-defined, unused-ignore]  # Linux alone has it
            except ProcessLookupError:
                raise self._ended(peer, pid) from None
            poll = select.poll()
            poll.register(self._own, select.POLLIN)
            poll.register(descriptor, select.POLLIN)
            self._processes[pid] = descriptor, poll
        return self._processes[pid]


def _memory_file(name: str, size: int, path: str | None) -> tuple[int, mmap.mmap]:
    """Return a new memory file, or the one at `path`: its descriptor and its memory."""
    if path is None:
        descriptor = os.memfd_create(name)  # type: ignore[attr-defined, unused-ignore]  # Linux alone has it
        os.ftruncate(descriptor, size)
    else:
        descriptor = os.open(path, os.O_RDWR)
    return descriptor, mmap.mmap(descriptor, size)


class _Ring:
    """The memory of an edge: counters and slots."""

    def __init__(self, slots: int, path: str | None = None) -> None:
        self.slots = slots
        size = _RING_HEAD + slots * _SLOT
        self.descriptor, file = _memory_file("penstock-ring", size, path)
        memory = memoryview(file)
        self.counters = memory[:_RING_HEAD].cast("Q")
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
        self.descriptor, self.map = _memory_file("penstock-payload", HEADER_BYTES + size, path)
        if path is not None:
            os.close(self.descriptor)
        self._lent: weakref.ref[Any] | None = None

    @property
    def free(self) -> bool:
        return self.map[0] == 0

    def payload(self) -> Tensor:
        """Return the bytes, for the sender to write."""
        return torch.frombuffer(memoryview(self.map)[HEADER_BYTES:], dtype=torch.uint8)

    def lend(self) -> Tensor:
        """Return the bytes, for the receiver to use; the segment is free again once no tensor refers to them."""
        block = (ctypes.c_ubyte * self.size).from_buffer(self.map, HEADER_BYTES)

        def release(_: weakref.ref[Any]) -> None:
            self.map[0] = 0

        self._lent = weakref.ref(block, release)
        return torch.frombuffer(block, dtype=torch.uint8)


class SharedOutgoing:
    """The sending end of an edge to rank `peer`, with at most `capacity` messages under way."""

    def __init__(self, peer: int, capacity: int, timeout: Timeout, wake_pipe: WakePipe, host: Host) -> None:
        self.peer, self.timeout, self.wake_pipe, self.host = peer, timeout, wake_pipe, host
        wake_pipe.connect(host)
        # One slot more than messages, so that a notice always has one.
        self.ring = _Ring(capacity + 1)
        self._left: list[_Ring] = []
        self._sent = 0
        self._layouts = SentLayouts()
        self._segments: list[_Segment] = []
        self.check: Callable[[], None] | None = None

    def offer(self) -> tuple[int, int]:
        """Return (descriptor, slots), by which the receiver opens the ring."""
        return self.ring.descriptor, self.ring.slots

    def send(self, step: int, tag: int, message: Message) -> None:
        number, layout, encoded = self._layouts.enter(message)
        # Twice: for the header, and for the address of a payload's segment behind the layout.
        require_fits(self.peer, len(encoded), FRAME_BYTES - 2 * HEADER_BYTES)
        start, size = aligned(HEADER_BYTES + len(encoded)), layout.payload_bytes
        inline = start + size <= FRAME_BYTES
        slot = self._wait_slot()
        frame = self.ring.frames[slot]
        flags = (INLINE if inline else 0) | (LAYOUT if encoded else 0)
        Header(flags, step, tag, number, len(encoded), size).write(frame, encoded)
        if inline:
            views = self.ring.views[slot].of(start, layout)
        else:
            index, segment = self._free_segment(size)
            _SEGMENT.pack_into(frame, start, index, segment.descriptor, segment.size)
            views = layout.views(segment.payload())
            segment.map[0] = 1
        for view, tensor in zip(views, layout.sent_tensors(message), strict=True):
            view.copy_(tensor)
        self._publish(slot)

    def notify(self, step: int, failure: Failure) -> None:
        ring = self.ring
        if self._sent - ring.counters[_TAKEN] >= ring.slots:
            return  # the receiver has not read the last notice yet
        slot = self._sent % ring.slots
        write_notice(ring.frames[slot], step, failure)
        self._publish(slot)

    def wait_sent(self) -> None:
        """Return at once, since messages are copied when they are sent."""

    def widen(self, capacity: int) -> None:
        """Let at least `capacity` messages be under way, on a larger ring if need be."""
        if capacity < self.ring.slots:
            return
        slot, ring = self._wait_slot(), _Ring(capacity + 1)
        Header(MOVED, 0, ring.descriptor, ring.slots, 0, 0).write(self.ring.frames[slot])
        self._publish(slot)
        self._left.append(self.ring)  # open until the end: the receiver may not have come to it
        self.ring, self._sent = ring, 0

    def close(self) -> None:
        for ring in (*self._left, self.ring):
            ring.close()
        for segment in self._segments:
            os.close(segment.descriptor)
        self._segments = []

    def _wait_slot(self) -> int:
        """Wait for a free slot for a message, and return its number."""
        ring, sent = self.ring, self._sent
        if sent - ring.counters[_TAKEN] >= ring.slots - 1:
            self.wake_pipe.wait(
                lambda: sent - ring.counters[_TAKEN] < ring.slots - 1,
                ring.counters,
                sleeps=_SENDER_SLEEPS,
                host=self.host,
                timeout=self.timeout.seconds,
                peer=self.peer,
                action="receive earlier messages",
                check=self.check,
            )
        return sent % ring.slots

    def _publish(self, slot: int) -> None:
        self._sent += 1
        self.ring.numbers[slot][0] = self._sent
        if self.ring.counters[_RECEIVER_SLEEPS]:
            self.wake_pipe.wake(self.host)

    def _free_segment(self, size: int) -> tuple[int, _Segment]:
        for index, segment in enumerate(self._segments):
            if segment.free and segment.size >= size:
                return index, segment
        self._segments.append(_Segment(size))
        return len(self._segments) - 1, self._segments[-1]


class SharedIncoming:
    """The receiving end of an edge from rank `peer`, on the ring that the sender offers."""

    def __init__(
        self, peer: int, timeout: Timeout, wake_pipe: WakePipe, host: Host, offer: tuple[int, int]
    ) -> None:
        self.peer, self.timeout, self.wake_pipe, self.host = peer, timeout, wake_pipe, host
        wake_pipe.connect(host)
        descriptor, slots = offer
        self.ring = _Ring(slots, f"/proc/{host.pid}/fd/{descriptor}")
        self._taken = 0
        self._layouts = ReceivedLayouts()
        self._segments: dict[int, _Segment] = {}

    def next(self) -> tuple[int, int, Message | Failure]:
        """Wait for the next message on the edge, and return (step, tag, content)."""
        while (header := self._arrived()) is None:
            self._wait_frame()
        slot = self._taken % self.ring.slots
        frame = self.ring.frames[slot]
        content: Message | Failure
        if header.flags & NOTICE:
            content = read_notice(header, frame)
        else:
            layout = self._layouts.read(header, frame)
            start = aligned(HEADER_BYTES + header.layout_bytes)
            if header.flags & INLINE:
                tensors = [view.clone() for view in self.ring.views[slot].of(start, layout)]
            else:
                tensors = layout.views(self._segment(frame, start).lend())
            content = layout.join(tensors)
        self._release()
        return header.step, header.tag, content

    def drop_before(self, step: int) -> None:
        """Drop what has arrived of earlier steps, which failed, so that it takes no place from a notice of a later one."""
        while (header := self._arrived()) is not None and header.step < step:
            self.next()

    @property
    def has_notice(self) -> bool:
        """True if the next message has arrived, and says that a rank failed."""
        header = self._arrived()
        return header is not None and bool(header.flags & NOTICE)

    def close(self) -> None:
        self.ring.close()
        self._segments.clear()

    def _arrived(self) -> Header | None:
        """Return the header of the next message if it is there, in this ring or the one that the sender has moved to."""
        while True:
            ring, slot = self.ring, self._taken % self.ring.slots
            if ring.numbers[slot][0] != self._taken + 1:
                return None
            header = Header.read(ring.frames[slot])
            if not header.flags & MOVED:
                return header
            self.ring = _Ring(header.layout, f"/proc/{self.host.pid}/fd/{header.tag}")
            self._taken = 0
            ring.close()

    def _wait_frame(self) -> None:
        """Wait for the next frame."""
        ring, wanted = self.ring, self._taken + 1
        number = ring.numbers[self._taken % ring.slots]
        self.wake_pipe.wait(
            lambda: number[0] == wanted,
            ring.counters,
            sleeps=_RECEIVER_SLEEPS,
            host=self.host,
            timeout=self.timeout.seconds,
            peer=self.peer,
            action="send",
        )

    def _segment(self, frame: memoryview, start: int) -> _Segment:
        index, descriptor, size = _SEGMENT.unpack_from(frame, start)
        if index not in self._segments:
            self._segments[index] = _Segment(size, f"/proc/{self.host.pid}/fd/{descriptor}")
        return self._segments[index]

    def _release(self) -> None:
        self._taken += 1
        self.ring.counters[_TAKEN] = self._taken
        if self.ring.counters[_SENDER_SLEEPS]:
            self.wake_pipe.wake(self.host)
