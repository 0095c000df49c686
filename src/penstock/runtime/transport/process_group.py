"""Edges between processes through ``torch.distributed``.

Each directed edge is a stream of frames (see `frame`) in the sender's order. The receiver keeps receives posted, across
steps, and the sender does not wait for them. Without latency the Program's slots would do. On a long link a message
that meets no posted receive waits for word of one, which takes a round trip. So as many are posted as messages can be under
way, as far as their buffers fit `POSTED_BYTES`, and never fewer than the slots.

A large value travels as a separate payload, without being copied into the frame. So that the payload, too, meets a receive
that is already posted, both ends follow one rule: when a message has been taken, the receiver posts the next receive, with
a payload buffer as large as the largest payload so far, unless enough are posted for buffers of that size. The sender fills
it with the payload, or with one byte if there is none or it is larger. A larger one follows separately, and is received once
the frame has announced it.

Values on a device travel through a separate communicator for each directed edge, so that neither the two directions nor two
edges can wait for each other (NCCL runs the operations of one communicator strictly in order). Their frames have no payload,
travel as always, and arrive while the device still computes. So the receive is posted in time, and no rank waits for a
device to learn a shape.

On a GPU the host waits for no value; streams do. NCCL sends from a separate stream once the work queued before is done, and
receives likewise. A receive is therefore posted from a stream on which nothing else is queued, or it would begin only after
all work that the rank queued before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.base.errors import PeerError, WaitTimeoutError, first_line, is_gloo_timeout
from penstock.runtime.health.hang import Timeout
from penstock.runtime.transport.channel import Failure
from penstock.runtime.transport.frame import (
    DEVICE,
    FRAME_BYTES,
    HEADER_BYTES,
    INLINE,
    LAYOUT,
    NOTICE,
    OVERSIZE,
    Header,
    MessageLayout,
    ReceivedLayouts,
    SentLayouts,
    Views,
    aligned,
    read_notice,
    require_fits,
    write_notice,
)
from penstock.stage.values import Message

POSTED_BYTES = 8 << 20
"""Bytes of the buffers of an edge's posted receives that are more than the Program's slots."""

_FRAME, _PAYLOAD, _EXTRA = 1, 2, 3  # tags of the three kinds of message on an edge


def posted_receives(slots: int, capacity: int, payload_bytes: int) -> int:
    """Return the number of receives that an edge's receiver keeps posted, for payload buffers of this size."""
    return max(slots, min(capacity, POSTED_BYTES // (FRAME_BYTES + payload_bytes)))


class _Frame:
    """A buffer for one frame."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(FRAME_BYTES))
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.views = Views(self.bytes)


class Bulk(NamedTuple):
    """The communicator of one directed edge for values on a device."""

    group: dist.ProcessGroup
    peer: int
    device: torch.device

    def wait_timeout(self, timeout: timedelta) -> timedelta | None:
        """Return the timeout of the host's wait for a value; None on a GPU, where a stream waits instead.

        NCCL's ``wait`` stops the host only if it has a timeout, and then polls once a millisecond. Without one, NCCL's
        watchdog, which has the same timeout, detects a value that never comes.
        """
        return None if self.device.type == "cuda" else timeout

    def greet(self, sends: bool, timeout: timedelta, rank: int) -> None:
        """Send or receive one byte, since NCCL connects two ranks at their first message, and both have to take part.

        Two ranks that both sent first, on two communicators, would wait forever; so all of them connect in the same order.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        exchange = self.group.send if sends else self.group.recv
        _wait(_begin(exchange, byte, self.peer, _PAYLOAD, rank), timeout, rank, "connect")


class _Sent(NamedTuple):
    """A message under way, with the memory it is sent from."""

    works: list[dist.Work]
    on_device: dist.Work | None
    frame: _Frame
    payload: Tensor


class GroupOutgoing:
    """The sending end of an edge: `capacity` messages may be under way, and the receiver posts at least `slots` receives."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        slots: int,
        capacity: int,
        timeout: Timeout,
        bulk: Bulk | None = None,
    ) -> None:
        self.group, self.peer, self.timeout, self.bulk = group, peer, timeout, bulk
        # One more than messages under way, for the one that is being written.
        self._free = [_Frame() for _ in range(capacity + 1)]
        self._pending: deque[_Sent] = deque()
        self._layouts = SentLayouts()
        self._posted_receives = partial(posted_receives, slots, capacity)
        # Sizes of the payload buffers that the receiver has posted.
        self._posted = deque([0] * self._posted_receives(0))
        self._largest = 0
        self._filler = torch.zeros(1, dtype=torch.uint8)

    def send(self, step: int, tag: int, message: Message) -> None:
        number, layout, encoded = self._layouts.enter(message)
        require_fits(self.peer, len(encoded), FRAME_BYTES - HEADER_BYTES)
        tensors = layout.sent_tensors(message)
        start, size = aligned(HEADER_BYTES + len(encoded)), layout.payload_bytes
        bulk = self._bulk_of(tensors)
        inline = bulk is None and start + size <= FRAME_BYTES
        payload = self._filler if inline else _joined(tensors, layout, bulk.device if bulk else None)
        flags = (INLINE if inline else 0) | (LAYOUT if encoded else 0) | (DEVICE if bulk else 0)
        posted = self._next_posted(0 if inline or bulk else size)
        if not (inline or bulk) and size > posted:
            flags |= OVERSIZE
        frame = self._free_frame()
        Header(flags, step, tag, number, len(encoded), size).write(frame.memory, encoded)
        if inline:
            for view, tensor in zip(frame.views.of(start, layout), tensors, strict=True):
                view.copy_(tensor)
        works = self._begin_all(frame.bytes[: start + size if inline else start], posted, payload, flags)
        on_device = None
        if bulk is not None and size:
            on_device = _begin(bulk.group.send, payload, bulk.peer, _PAYLOAD, self.peer)
        self._pending.append(_Sent(works, on_device, frame, payload))

    def notify(self, step: int, failure: Failure) -> None:
        posted = self._next_posted(0)
        frame = _Frame()
        size = write_notice(frame.memory, step, failure)
        works = self._begin_all(frame.bytes[:size], posted, self._filler, NOTICE)
        self._pending.append(_Sent(works, None, frame, self._filler))

    def wait_sent(self, max_pending: int = 0) -> None:
        """Wait until at most `max_pending` messages are under way, and release the memory of those that have arrived."""
        while len(self._pending) > max_pending:
            works, on_device, frame, _ = self._pending.popleft()
            for work in works:
                _wait(work, self.timeout.delta, self.peer, "receive earlier messages")
            if on_device is not None and self.bulk is not None:
                # On a GPU the stream waits, on which the memory of the payload may be reused from now on.
                timeout = self.bulk.wait_timeout(self.timeout.delta)
                _wait(on_device, timeout, self.peer, "take a value on a device")
            self._free.append(frame)

    def widen(self, capacity: int) -> None:
        """Let at least `capacity` messages be under way; the receiver posts no more receives than before."""
        missing = capacity + 1 - len(self._free) - len(self._pending)
        self._free += [_Frame() for _ in range(missing)]

    def close(self) -> None:
        """Do nothing: messages under way end with the group."""

    def _bulk_of(self, tensors: list[Tensor]) -> Bulk | None:
        bulk = self.bulk
        on_device = bulk is not None and any(t.device.type == bulk.device.type for t in tensors)
        return bulk if on_device else None

    def _begin_all(self, frame: Tensor, posted: int, payload: Tensor, flags: int) -> list[dist.Work]:
        """Begin the sends of a message through the group: its frame, and what the posted payload buffer gets."""
        works = [self._begin(frame, _FRAME)]
        if posted:
            fits = not flags & (INLINE | OVERSIZE | DEVICE)
            works.append(self._begin(payload if fits else self._filler, _PAYLOAD))
        if flags & OVERSIZE:
            works.append(self._begin(payload, _EXTRA))
        return works

    def _begin(self, tensor: Tensor, tag: int) -> dist.Work:
        return _begin(self.group.send, tensor, self.peer, tag, self.peer)

    def _free_frame(self) -> _Frame:
        if not self._free:
            self.wait_sent(len(self._pending) - 1)
        return self._free.pop()

    def _next_posted(self, payload: int) -> int:
        """Return the size of the payload buffer posted for this message, whose payload has `payload` bytes."""
        posted = self._posted.popleft()
        self._largest = max(self._largest, payload)
        if len(self._posted) < self._posted_receives(self._largest):
            self._posted.append(self._largest)
        return posted


class _Posted(NamedTuple):
    """The receives of one message."""

    frame: _Frame
    work: dist.Work
    payload: Tensor | None
    payload_work: dist.Work | None


class GroupIncoming:
    """The receiving end of an edge, with at least `slots` receives posted, for at most `capacity` messages under way."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        slots: int,
        capacity: int,
        timeout: Timeout,
        bulk: Bulk | None = None,
    ) -> None:
        self.group, self.peer, self.timeout, self.bulk = group, peer, timeout, bulk
        self._stream: Any = None
        if bulk is not None and bulk.device.type == "cuda":
            self._stream = torch.cuda.Stream(bulk.device)
        self._layouts = ReceivedLayouts()
        self._posted: deque[_Posted] = deque()
        self._largest = 0
        self._posted_receives = partial(posted_receives, slots, capacity)
        for _ in range(self._posted_receives(0)):
            self._post(_Frame())

    def close(self) -> None:
        """Do nothing: the posted receives end with the group."""

    def _begin(self, tensor: Tensor, tag: int) -> dist.Work:
        return _begin(self.group.recv, tensor, self.peer, tag, self.peer)

    def _wait(self, work: dist.Work, action: str) -> None:
        _wait(work, self.timeout.delta, self.peer, action)

    def _post(self, frame: _Frame) -> None:
        payload, payload_work = None, None
        work = self._begin(frame.bytes, _FRAME)
        if self._largest:
            payload = torch.empty(self._largest, dtype=torch.uint8)
            payload_work = self._begin(payload, _PAYLOAD)
        self._posted.append(_Posted(frame, work, payload, payload_work))

    def next(self) -> tuple[int, int, Message | Failure]:
        """Wait for the next message on the edge, and return (step, tag, content)."""
        frame, work, payload, payload_work = self._posted[0]
        self._wait(work, "send")
        header = Header.read(frame.memory)
        if payload_work is not None:
            self._wait(payload_work, "send the rest of a message")
        self._posted.popleft()
        content: Message | Failure
        if header.flags & NOTICE:
            content = read_notice(header, frame.memory)
        else:
            layout = self._layouts.read(header, frame.memory)
            content = layout.join(self._tensors(header, layout, frame, payload))
        if len(self._posted) < self._posted_receives(self._largest):
            self._post(frame)
        return header.step, header.tag, content

    def _tensors(
        self, header: Header, layout: MessageLayout, frame: _Frame, payload: Tensor | None
    ) -> list[Tensor]:
        if header.flags & INLINE:
            start = aligned(HEADER_BYTES + header.layout_bytes)
            return [view.clone() for view in frame.views.of(start, layout)]
        if header.flags & DEVICE:
            return self._from_device(layout)
        self._largest = max(self._largest, header.payload_bytes)
        if header.flags & OVERSIZE:
            payload = torch.empty(header.payload_bytes, dtype=torch.uint8)
            self._wait(self._begin(payload, _EXTRA), "send a large message")
        assert payload is not None
        return layout.views(payload)

    def _from_device(self, layout: MessageLayout) -> list[Tensor]:
        bulk, receiving = self.bulk, self._stream
        assert bulk is not None
        # In this context `receiving` is the current stream: it owns the buffer's memory, and it is the one that waits.
        with torch.cuda.stream(receiving) if receiving is not None else nullcontext():
            payload = torch.empty(layout.payload_bytes, dtype=torch.uint8, device=bulk.device)
            if layout.payload_bytes:
                work = _begin(bulk.group.recv, payload, bulk.peer, _PAYLOAD, self.peer)
                _wait(work, bulk.wait_timeout(self.timeout.delta), self.peer, "send a value on a device")
        if receiving is not None:
            computing = torch.cuda.current_stream(bulk.device)
            computing.wait_stream(receiving)
            # A freed buffer must not be reused before the computing stream is done with it.
            payload.record_stream(computing)
        return layout.views(payload)


def _joined(tensors: list[Tensor], layout: MessageLayout, device: torch.device | None) -> Tensor:
    """Return a payload in one piece: the tensor itself if there is one, or a buffer with all of them."""
    if len(tensors) == 1:
        # The memory of a negative view has the numbers before the negation.
        return tensors[0].detach().contiguous().resolve_neg()
    joined = torch.empty(layout.payload_bytes, dtype=torch.uint8, device=device)
    for view, tensor in zip(layout.views(joined), tensors, strict=True):
        view.copy_(tensor)
    return joined


def _begin(
    start: Callable[[list[Tensor], int, int], dist.Work], tensor: Tensor, peer: int, tag: int, rank: int
) -> dist.Work:
    """Begin to send or receive; raise PeerError if the connection is already known to be broken."""
    try:
        return start([tensor], peer, tag)
    except RuntimeError as error:
        raise _connection_error(rank, error) from error


def _connection_error(rank: int, error: RuntimeError) -> PeerError:
    return PeerError(f"the connection to rank {rank} broke: {first_line(error)}")


def _wait(work: dist.Work, timeout: timedelta | None, peer: int, action: str) -> None:
    try:
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)
    except RuntimeError as error:
        if timeout is not None and is_gloo_timeout(error):
            raise WaitTimeoutError(
                f"waited {timeout.total_seconds():g} s for rank {peer} to {action}"
            ) from error
        raise _connection_error(peer, error) from error
