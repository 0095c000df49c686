"""Edges between processes through ``torch.distributed``.

Each directed edge is a stream of frames (see `wire`) in the sender's order. The receiver keeps as many receives posted
as the Program's edge has slots, across steps; the sender does not wait for them.

A large value travels as a payload of its own, without being copied into the frame. So that the payload, too, finds
a receive posted ahead, both ends follow one rule: with message n the receiver posts a payload buffer as large as the
largest payload among the messages up to n - slots. The sender fills it with the payload, or, if there is none or it is
larger, with one byte; a larger one follows separately and is received when the frame has announced it.

Values on a device travel through a communicator of their own, one a directed edge, so that neither the two directions
nor two edges can wait for each other (NCCL runs what one communicator gets strictly in order). Their frames, which
carry no payload then, go as always, and reach the receiver while the device still computes; so its receive is posted in
time, and no rank waits for a device to learn a shape.

On a GPU the host waits for no value at all: streams do. NCCL sends from a stream of its own once what was queued before
is done, and receives likewise; a receive is therefore posted from a stream on which nothing else is queued, or it would
begin only after all that the rank was told to compute before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.errors import PeerError, TransportError, WaitTimeoutError
from penstock.runtime.transport.channel import Failure
from penstock.runtime.transport.frame import (
    DEVICE,
    FAILURE,
    FRAME_BYTES,
    HEADER_BYTES,
    INLINE,
    LAYOUT,
    OVERSIZE,
    Header,
    Layout,
    LayoutBook,
    Views,
    aligned,
)
from penstock.runtime.workers.timeout import Timeout
from penstock.stage.values import Message

_FRAME, _PAYLOAD, _EXTRA = 1, 2, 3  # tags of the three kinds of message on an edge


class _Frame:
    """A buffer for one frame."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(FRAME_BYTES))
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.views = Views(self.bytes)


class Bulk(NamedTuple):
    """The communicator of one directed edge for values on a device.

    Attributes:
        group: of the two ranks.
        peer: the other rank's number in it.
        device: whose values it carries.
    """

    group: dist.ProcessGroup
    peer: int
    device: torch.device

    def wait_timeout(self, timeout: timedelta) -> timedelta | None:
        """How long the host waits for a value at the most; None on a GPU, where a stream waits in its place.

        NCCL's ``wait`` stops the host only if it is given a limit, and asks once a millisecond then. Without one a
        value that never comes is found by NCCL's watchdog, which has the same limit.
        """
        return None if self.device.type == "cuda" else timeout

    def greet(self, sends: bool, timeout: timedelta, rank: int) -> None:
        """Send or receive one byte. NCCL connects two ranks in their first message, where each waits for the other.

        Two ranks that both sent first, over two lanes, would wait for ever; so all greet in one order at the start.

        Args:
            sends: whether this end sends it.
            timeout: of the wait.
            rank: of the peer in its pipeline, for the error.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        exchange = self.group.send if sends else self.group.recv
        _wait(_begin(exchange, byte, self.peer, _PAYLOAD, rank), timeout, rank, "connect")


class GroupOutgoing:
    """The sending end of an edge."""

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
        self._free = [_Frame() for _ in range(capacity + 1)]
        self._pending: deque[tuple[list[dist.Work], dist.Work | None, _Frame, Any]] = deque()
        self._book = LayoutBook()
        self._posted = deque([0] * slots)
        self._largest = 0
        self._filler = torch.zeros(1, dtype=torch.uint8)

    def send(self, step: int, tag: int, message: Message) -> None:
        number, layout, news = self._book.enter(message)
        start = aligned(HEADER_BYTES + len(news))
        size = layout.payload_bytes
        tensors = layout.leave(message)
        bulk = self.bulk
        if bulk is not None and not any(t.device.type == bulk.device.type for t in tensors):
            bulk = None
        inline = bulk is None and start + size <= FRAME_BYTES
        if start > FRAME_BYTES:
            raise TransportError(
                f"the description of a value for rank {self.peer} takes {len(news)} bytes; at most "
                f"{FRAME_BYTES - HEADER_BYTES} fit: hand over fewer or shorter plain values"
            )
        flags = (INLINE if inline else 0) | (LAYOUT if news else 0) | (DEVICE if bulk else 0)
        outside = None if inline else _outside(tensors, layout, bulk.device if bulk else None)
        posted = self._advance(0 if inline or bulk else size)
        if outside is not None and bulk is None and size > posted:
            flags |= OVERSIZE
        frame = self._frame()
        Header(flags, step, tag, number, len(news), size).write(frame.memory)
        if news:
            frame.memory[HEADER_BYTES : HEADER_BYTES + len(news)] = news
        if inline:
            for view, tensor in zip(frame.views.of(start, layout), tensors, strict=True):
                view.copy_(tensor)
        works = [self._begin(frame.bytes[: start + size if inline else start], _FRAME)]
        if posted:
            fits = outside is not None and not flags & (OVERSIZE | DEVICE)
            body = outside if fits and outside is not None else self._filler
            works.append(self._begin(body, _PAYLOAD))
        if flags & OVERSIZE:
            assert outside is not None
            works.append(self._begin(outside, _EXTRA))
        on_device = None
        if bulk is not None and size:
            assert outside is not None
            on_device = _begin(bulk.group.send, outside, bulk.peer, _PAYLOAD, self.peer)
        self._pending.append((works, on_device, frame, outside))

    def fail(self, failure: Failure) -> None:
        text = failure.message.encode()[: FRAME_BYTES - HEADER_BYTES]
        posted = self._advance(0)
        frame = _Frame()
        Header(FAILURE, failure.step, failure.rank, 0, len(text), 0).write(frame.memory)
        frame.memory[HEADER_BYTES : HEADER_BYTES + len(text)] = text
        works = [self._begin(frame.bytes[: HEADER_BYTES + len(text)], _FRAME)]
        if posted:
            works.append(self._begin(self._filler, _PAYLOAD))
        self._pending.append((works, None, frame, None))

    def wait_sent(self, most: int = 0) -> None:
        """Wait until at most `most` messages are under way, and let go of the rest."""
        while len(self._pending) > most:
            works, on_device, frame, _ = self._pending.popleft()
            for work in works:
                _wait(work, self.timeout.delta, self.peer, "take what was sent")
            if on_device is not None and self.bulk is not None:
                # On a GPU the stream waits, on which the memory of what was sent may be used again from now on.
                _wait(
                    on_device,
                    self.bulk.wait_timeout(self.timeout.delta),
                    self.peer,
                    "take a value on a device",
                )
            self._free.append(frame)

    def close(self) -> None:
        """What is under way ends with the group."""

    def _begin(self, tensor: Tensor, tag: int) -> dist.Work:
        return _begin(self.group.send, tensor, self.peer, tag, self.peer)

    def _frame(self) -> _Frame:
        if not self._free:
            self.wait_sent(len(self._pending) - 1)
        return self._free.pop()

    def _advance(self, payload: int) -> int:
        """The size of the payload buffer that the receiver has posted for this message."""
        posted = self._posted.popleft()
        self._largest = max(self._largest, payload)
        self._posted.append(self._largest)
        return posted


class GroupIncoming:
    """The receiving end of an edge."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        slots: int,
        timeout: Timeout,
        bulk: Bulk | None = None,
    ) -> None:
        self.group, self.peer, self.timeout, self.bulk = group, peer, timeout, bulk
        self._stream: Any = None
        if bulk is not None and bulk.device.type == "cuda":
            self._stream = torch.cuda.Stream(bulk.device)  # type: ignore[no-untyped-call]
        self._layouts: list[Layout] = []
        self._posted: deque[tuple[_Frame, dist.Work, Tensor | None, dist.Work | None]] = deque()
        self._largest = 0
        for _ in range(slots):
            self._post(_Frame())

    def close(self) -> None:
        """The posted receives end with the group."""

    def _begin(self, tensor: Tensor, tag: int) -> dist.Work:
        return _begin(self.group.recv, tensor, self.peer, tag, self.peer)

    def _post(self, frame: _Frame) -> None:
        body, work = None, None
        first = self._begin(frame.bytes, _FRAME)
        if self._largest:
            body = torch.empty(self._largest, dtype=torch.uint8)
            work = self._begin(body, _PAYLOAD)
        self._posted.append((frame, first, body, work))

    def next(self) -> tuple[int, int, Message | Failure]:
        """Wait for the next message on the edge: (step, tag, content)."""
        frame, first, body, work = self._posted[0]
        _wait(first, self.timeout.delta, self.peer, "send")
        header = Header.read(frame.memory)
        if work is not None:
            _wait(work, self.timeout.delta, self.peer, "send the rest of a message")
        self._posted.popleft()
        end = HEADER_BYTES + header.layout_bytes
        if header.flags & FAILURE:
            text = bytes(frame.memory[HEADER_BYTES:end]).decode(errors="replace")
            self._post(frame)
            return header.step, header.tag, Failure(header.tag, header.step, text)
        if header.flags & LAYOUT:
            if header.layout == 0:
                self._layouts.clear()
            self._layouts.append(Layout.from_bytes(bytes(frame.memory[HEADER_BYTES:end])))
        layout = self._layouts[header.layout]
        if header.flags & INLINE:
            tensors = [view.clone() for view in frame.views.of(aligned(end), layout)]
        elif header.flags & DEVICE:
            tensors = self._from_device(layout)
        else:
            self._largest = max(self._largest, header.payload_bytes)
            if header.flags & OVERSIZE:
                body = torch.empty(header.payload_bytes, dtype=torch.uint8)
                _wait(
                    self._begin(body, _EXTRA),
                    self.timeout.delta,
                    self.peer,
                    "send a large message",
                )
            assert body is not None
            tensors = layout.views(body)
        self._post(frame)
        return header.step, header.tag, layout.join(tensors)

    def _from_device(self, layout: Layout) -> list[Tensor]:
        bulk, aside = self.bulk, self._stream
        assert bulk is not None
        # Within this context `aside` is the current stream: the buffer is its memory, and it is what waits.
        with torch.cuda.stream(aside) if aside is not None else nullcontext():
            body = torch.empty(layout.payload_bytes, dtype=torch.uint8, device=bulk.device)
            if layout.payload_bytes:
                work = _begin(bulk.group.recv, body, bulk.peer, _PAYLOAD, self.peer)
                _wait(work, bulk.wait_timeout(self.timeout.delta), self.peer, "send a value on a device")
        if aside is not None:
            computing = torch.cuda.current_stream(bulk.device)
            computing.wait_stream(aside)
            body.record_stream(
                computing
            )  # freed, the buffer is not used again before that stream is done with it
        return layout.views(body)


def _outside(tensors: list[Tensor], layout: Layout, device: torch.device | None) -> Tensor:
    """A payload in one piece: the tensor itself if there is but one, or all in one buffer."""
    if len(tensors) == 1:
        return tensors[0].detach().contiguous().resolve_neg()
    joined = torch.empty(layout.payload_bytes, dtype=torch.uint8, device=device)
    for view, tensor in zip(layout.views(joined), tensors, strict=True):
        view.copy_(tensor)
    return joined


def _begin(
    start: Callable[[list[Tensor], int, int], dist.Work], tensor: Tensor, at: int, tag: int, rank: int
) -> dist.Work:
    """Begin to send or receive; where the connection is known to be broken, that is the peer's failure and not this rank's.

    Args:
        start: ``send`` or ``recv`` of a group.
        at: the peer's number in the group.
        rank: in the pipeline.
    """
    try:
        return start([tensor], at, tag)
    except RuntimeError as error:
        raise _broken(rank, error) from error


def _broken(rank: int, error: RuntimeError) -> PeerError:
    return PeerError(f"the connection to rank {rank} broke: {str(error).splitlines()[0]}")


def _wait(work: dist.Work, timeout: timedelta | None, peer: int, what: str) -> None:
    try:
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)
    except RuntimeError as error:
        text = str(error)
        if "imed out" in text and timeout is not None:
            raise WaitTimeoutError(
                f"waited {timeout.total_seconds():g} s for rank {peer} to {what}"
            ) from error
        raise _broken(peer, error) from error
