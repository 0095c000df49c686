"""Format of a message between processes: a small frame, followed for large values by a payload.

A frame is a header, the layout of the value if the receiver does not know it yet, and the value itself if it is small:

    bytes 0-63   magic, flags, step, tag, layout number, bytes of layout, bytes of payload
    then         the layout as JSON, if flag LAYOUT is set
    then         the payload, if flag INLINE is set; every tensor starts at a multiple of 64

Layouts are numbered per edge in the order in which they first appear, so metadata travels only when it changes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import TransportError
from penstock.runtime.transport.channel import Failure
from penstock.stage import structures
from penstock.stage.values import Message


class Strided(NamedTuple):
    """Memory layout of a tensor that is not contiguous, so that another process can restore it.

    Kernels choose by strides in which order they add, so a value has plain PyTorch's bits in another process only if it has
    the same strides there. Therefore the memory that a tensor spans is sent unchanged. For one without gaps (transposed,
    channels last, expanded) that is at most its elements, without a copy. If more than half of that memory is gaps, only
    the elements are sent, and the receiver restores the gaps.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool

    @staticmethod
    def of(tensor: Tensor) -> Strided | None:
        """Return the memory layout of a tensor; None if it is contiguous or empty."""
        strides, expected, contiguous = tensor.stride(), 1, True
        for size, stride in zip(reversed(tensor.shape), reversed(strides), strict=True):
            contiguous = contiguous and stride == expected
            expected *= max(size, 1)
        conj = tensor.is_conj()
        if not tensor.numel() or (contiguous and not conj):
            return None
        return Strided(tuple(tensor.shape), tuple(strides), conj)

    @property
    def extent(self) -> int:
        """Number of elements in the memory that the tensor spans."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def mostly_gaps(self) -> bool:
        """True if gaps are more than half of that memory, so that only the elements are sent."""
        return self.extent > 2 * torch.Size(self.shape).numel()

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that is sent."""
        return self.shape if self.mostly_gaps else (self.extent,)

    def sent_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor to send: a view of the memory of `tensor`."""
        tensor = tensor.conj() if self.conj else tensor
        return tensor if self.mostly_gaps else tensor.as_strided((self.extent,), (1,))

    def restore(self, received: Tensor) -> Tensor:
        """Return the tensor with its strides from the one that was sent."""
        if self.mostly_gaps:
            memory = received.new_empty(self.extent)
            memory.as_strided(self.shape, self.strides).copy_(received)
            received = memory
        tensor = received.as_strided(self.shape, self.strides)
        return tensor.conj() if self.conj else tensor


FRAME_BYTES = 1 << 16
HEADER_BYTES = 64  # payloads behind it are aligned as torch's own memory is
# Bits of `Header.flags`.
INLINE, NOTICE, LAYOUT, OVERSIZE, DEVICE, MOVED = 1, 2, 4, 8, 16, 32
# More than these come from shapes that always change; both ends then start again, so that memory stays bounded.
MAX_LAYOUTS = 256

_HEADER = struct.Struct("<4sIqqqqq")
_MAGIC = b"PNS1"


class Header(NamedTuple):
    """The first bytes of a frame; all sizes in bytes."""

    flags: int
    step: int
    tag: int
    layout: int
    layout_bytes: int
    payload_bytes: int

    def write(self, buffer: memoryview, layout: bytes = b"") -> None:
        """Write the header to the start of a frame, and an encoded layout behind it if there is one."""
        _HEADER.pack_into(buffer, 0, _MAGIC, *self)
        if layout:
            buffer[HEADER_BYTES : HEADER_BYTES + len(layout)] = layout

    @staticmethod
    def read(buffer: memoryview) -> Header:
        magic, *fields = _HEADER.unpack_from(buffer, 0)
        if magic != _MAGIC:
            raise TransportError(f"a message that is not a Penstock frame arrived (it starts with {magic!r})")
        return Header(*fields)


def aligned(size: int) -> int:
    """Round up to a multiple of 64 bytes, which suits every dtype."""
    return (size + 63) & ~63


def write_notice(buffer: memoryview, step: int, failure: Failure) -> int:
    """Write a frame with a notice, and return its size in bytes."""
    text = failure.message.encode()[: FRAME_BYTES - HEADER_BYTES]
    Header(NOTICE, step, failure.rank, 0, len(text), 0).write(buffer, text)
    return HEADER_BYTES + len(text)


def read_notice(header: Header, buffer: memoryview) -> Failure:
    """Read a notice from a frame."""
    text = bytes(buffer[HEADER_BYTES : HEADER_BYTES + header.layout_bytes])
    return Failure(header.tag, header.step, text.decode(errors="replace"))


def require_fits(peer: int, layout_bytes: int, available: int) -> None:
    """Raise TransportError if the description of a value for rank `peer` is larger than `available` bytes."""
    if layout_bytes > available:
        raise TransportError(
            f"the description of a value for rank {peer} takes {layout_bytes} bytes; at most {available} fit: hand over "
            "fewer or shorter plain values"
        )


class Leaf(NamedTuple):
    """A tensor among the leaves of a value."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool
    strided: Strided | None = None


@dataclass(frozen=True)
class MessageLayout:
    """The shape of a value."""

    tensors: tuple[Leaf | None, ...]
    plain: tuple[Any, ...]
    structure: Any

    @cached_property
    def places(self) -> tuple[tuple[int, int, torch.dtype, tuple[int, ...]], ...]:
        """(offset, bytes, dtype, shape) of every tensor in the payload."""
        places, offset = [], 0
        for leaf in self.tensors:
            if leaf is not None:
                shape = leaf.shape if leaf.strided is None else leaf.strided.sent_shape
                size = torch.Size(shape).numel() * leaf.dtype.itemsize
                places.append((offset, size, leaf.dtype, shape))
                offset = aligned(offset + size)
        return tuple(places)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes from the first tensor's start to the last one's end."""
        return self.places[-1][0] + self.places[-1][1] if self.places else 0

    @cached_property
    def _strided(self) -> tuple[tuple[int, Strided], ...]:
        tensors = [leaf for leaf in self.tensors if leaf is not None]
        return tuple((n, leaf.strided) for n, leaf in enumerate(tensors) if leaf.strided is not None)

    def sent_tensors(self, message: Message) -> list[Tensor]:
        """Return the tensors to send for a message, in order: its own, or views of their memory."""
        tensors = [leaf for leaf in message.leaves if isinstance(leaf, Tensor)]
        for n, strided in self._strided:
            tensors[n] = strided.sent_tensor(tensors[n])
        return tensors

    def views(self, payload: Tensor) -> list[Tensor]:
        """Return the tensors in a payload, as views.

        Args:
            payload: uint8 tensor of at least `payload_bytes`, which starts at a multiple of 64.
        """
        return [
            payload[offset : offset + size].view(dtype).view(shape)
            if size
            else payload.new_empty(shape, dtype=dtype)
            for offset, size, dtype, shape in self.places
        ]

    def join(self, tensors: list[Tensor]) -> Message:
        """Make a message of received tensors, whose memory it takes over, and the plain leaves."""
        for n, strided in self._strided:
            tensors[n] = strided.restore(tensors[n])
        if len(self.tensors) == 1 and tensors:
            assert self.tensors[0] is not None
            return Message((tensors[0],), self.structure, (self.tensors[0].needs_grad,))
        received, plain = iter(tensors), iter(self.plain)
        return Message(
            tuple(next(plain) if leaf is None else next(received) for leaf in self.tensors),
            self.structure,
            tuple(leaf is not None and leaf.needs_grad for leaf in self.tensors),
        )

    def to_bytes(self) -> bytes:
        """Encode the layout as JSON."""
        leaves = [
            None
            if leaf is None
            else [
                str(leaf.dtype).removeprefix("torch."),
                leaf.shape,
                leaf.needs_grad,
                *(() if leaf.strided is None else leaf.strided[1:]),
            ]
            for leaf in self.tensors
        ]
        structure = None if self.structure is None else structures.dumps(self.structure)
        return json.dumps({"leaves": leaves, "plain": self.plain, "structure": structure}).encode()

    @staticmethod
    def from_bytes(data: bytes) -> MessageLayout:
        """Decode a layout from JSON."""
        fields = json.loads(data)
        return MessageLayout(
            tuple(None if leaf is None else _leaf(*leaf) for leaf in fields["leaves"]),
            tuple(fields["plain"]),
            None if fields["structure"] is None else structures.loads(fields["structure"]),
        )


def _leaf(
    dtype: str, shape: list[int], needs_grad: bool, strides: list[int] | None = None, conj: bool = False
) -> Leaf:
    strided = None if strides is None else Strided(tuple(shape), tuple(strides), conj)
    return Leaf(_dtype(dtype), tuple(shape), needs_grad, strided)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TransportError(f"a value has the dtype {name!r:.80}, which torch does not know here")
    return dtype


def layout_of(message: Message) -> MessageLayout:
    leaves = message.leaves
    return MessageLayout(
        tuple(
            Leaf(leaf.dtype, tuple(leaf.shape), need, Strided.of(leaf)) if isinstance(leaf, Tensor) else None
            for leaf, need in zip(leaves, message.needs_grad, strict=True)
        ),
        tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor)),
        message.structure,
    )


def signature(message: Message) -> tuple[Any, ...]:
    """Return a key that messages of one layout share; cheap to make and to compare."""
    leaves = message.leaves
    if len(leaves) == 1 and isinstance(x := leaves[0], Tensor):
        return (x.dtype, x.shape, x.stride(), x.is_conj(), message.needs_grad, message.structure)
    return (
        tuple(
            (x.dtype, x.shape, x.stride(), x.is_conj()) if isinstance(x, Tensor) else (type(x), x)
            for x in leaves
        ),
        message.needs_grad,
        message.structure,
    )


class SentLayouts:
    """The sender's numbering of the layouts on an edge."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[int, MessageLayout]] = {}

    def enter(self, message: Message) -> tuple[int, MessageLayout, bytes]:
        """Return the layout's number, the layout, and its encoding if the receiver does not know it (else empty)."""
        key = signature(message)
        known = self._known.get(key)
        if known is not None:
            return *known, b""
        if len(self._known) >= MAX_LAYOUTS:
            self._known.clear()
        layout = layout_of(message)
        self._known[key] = len(self._known), layout
        return *self._known[key], layout.to_bytes()


class ReceivedLayouts:
    """The receiver's numbering of the layouts on an edge."""

    def __init__(self) -> None:
        self._known: list[MessageLayout] = []

    def read(self, header: Header, frame: memoryview) -> MessageLayout:
        """Return the layout of a frame, which it contains or an earlier one did."""
        if header.flags & LAYOUT:
            if header.layout == 0:  # the sender numbers from 0 again after `MAX_LAYOUTS`
                self._known.clear()
            end = HEADER_BYTES + header.layout_bytes
            self._known.append(MessageLayout.from_bytes(bytes(frame[HEADER_BYTES:end])))
        return self._known[header.layout]


class Views:
    """The tensors of layouts in one frame's memory, made once for each layout."""

    def __init__(self, frame: Tensor) -> None:
        self._frame = frame
        self._known: dict[tuple[int, int], tuple[MessageLayout, list[Tensor]]] = {}

    def of(self, start: int, layout: MessageLayout) -> list[Tensor]:
        """Return the tensors of a payload that begins at byte `start`."""
        key = (start, id(layout))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_LAYOUTS:
                self._known.clear()
            # The layout is kept so that no other object gets its id.
            known = self._known[key] = layout, layout.views(self._frame[start:])
        return known[1]
