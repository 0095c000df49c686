"""How a message looks between processes: a small frame, and for large values a payload behind it.

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

from penstock.errors import TransportError
from penstock.runtime.transport.strides import Strided
from penstock.stage import structures
from penstock.stage.values import Message

FRAME_BYTES = 1 << 16
HEADER_BYTES = 64
INLINE, FAILURE, LAYOUT, OVERSIZE, DEVICE = 1, 2, 4, 8, 16
MOST_LAYOUTS = 256

_HEADER = struct.Struct("<4sIqqqqq")
_MAGIC = b"PNS1"


class Header(NamedTuple):
    """A frame's first bytes; all counts in bytes."""

    flags: int
    step: int
    tag: int
    layout: int
    layout_bytes: int
    payload_bytes: int

    def write(self, buffer: memoryview) -> None:
        """Put the header at the start of a frame."""
        _HEADER.pack_into(buffer, 0, _MAGIC, *self)

    @staticmethod
    def read(buffer: memoryview) -> Header:
        """Take the header from a frame.

        Raises:
            TransportError: these bytes are no frame.
        """
        magic, *fields = _HEADER.unpack_from(buffer, 0)
        if magic != _MAGIC:
            raise TransportError(f"a message that is no Penstock frame arrived (it starts with {magic!r})")
        return Header(*fields)


def aligned(size: int) -> int:
    """Round up to a multiple of 64 bytes, which suits every dtype."""
    return (size + 63) & ~63


class Leaf(NamedTuple):
    """A tensor among the leaves of a value.

    Attributes:
        dtype, shape: of the tensor.
        needs_grad: whether a gradient for it is to come back.
        strided: how it lies in memory; None for the usual way.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool
    strided: Strided | None = None


@dataclass(frozen=True)
class Layout:
    """The shape of a value.

    Attributes:
        tensors: per leaf what it is, or None where the leaf is plain.
        plain: the plain leaves in order.
        structure: the pytree spec, or None.
    """

    tensors: tuple[Leaf | None, ...]
    plain: tuple[Any, ...]
    structure: Any

    @cached_property
    def places(self) -> tuple[tuple[int, int, torch.dtype, tuple[int, ...]], ...]:
        """(offset, bytes, dtype, shape) of what travels of every tensor, in the payload."""
        found, at = [], 0
        for leaf in self.tensors:
            if leaf is not None:
                shape = leaf.shape if leaf.strided is None else leaf.strided.travels
                size = torch.Size(shape).numel() * leaf.dtype.itemsize
                found.append((at, size, leaf.dtype, shape))
                at = aligned(at + size)
        return tuple(found)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes from the first tensor's start to the last one's end."""
        return self.places[-1][0] + self.places[-1][1] if self.places else 0

    @cached_property
    def _strided(self) -> tuple[tuple[int, Strided], ...]:
        tensors = [leaf for leaf in self.tensors if leaf is not None]
        return tuple((n, leaf.strided) for n, leaf in enumerate(tensors) if leaf.strided is not None)

    def leave(self, message: Message) -> list[Tensor]:
        """What travels of a message's tensors, in order."""
        tensors = [leaf for leaf in message.leaves if isinstance(leaf, Tensor)]
        for n, strided in self._strided:
            tensors[n] = strided.leave(tensors[n])
        return tensors

    def views(self, payload: Tensor) -> list[Tensor]:
        """What travels of the tensors, in a payload, as views.

        Args:
            payload: uint8, at least `payload_bytes` long, starting at a multiple of 64.
        """
        return [
            payload[at : at + size].view(dtype).view(shape) if size else payload.new_empty(shape, dtype=dtype)
            for at, size, dtype, shape in self.places
        ]

    def join(self, tensors: list[Tensor]) -> Message:
        """What has travelled and plain leaves as a message; the tensors' memory is the message's from now on."""
        for n, strided in self._strided:
            tensors[n] = strided.arrive(tensors[n])
        if len(self.tensors) == 1 and tensors:
            assert self.tensors[0] is not None
            return Message((tensors[0],), self.structure, (self.tensors[0].needs_grad,))
        moving, resting = iter(tensors), iter(self.plain)
        return Message(
            tuple(next(resting) if leaf is None else next(moving) for leaf in self.tensors),
            self.structure,
            tuple(leaf is not None and leaf.needs_grad for leaf in self.tensors),
        )

    def to_bytes(self) -> bytes:
        """As JSON."""
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
    def from_bytes(data: bytes) -> Layout:
        """From JSON.

        Raises:
            TransportError: it names a dtype or a class that there is not, or a module that this process has not loaded.
        """
        fields = json.loads(data)
        return Layout(
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
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TransportError(f"a value has the dtype {name!r:.80}, which torch does not know here")
    return found


def layout_of(message: Message) -> Layout:
    """The layout of a message."""
    leaves = message.leaves
    return Layout(
        tuple(
            Leaf(leaf.dtype, tuple(leaf.shape), need, Strided.of(leaf)) if isinstance(leaf, Tensor) else None
            for leaf, need in zip(leaves, message.needs_grad, strict=True)
        ),
        tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor)),
        message.structure,
    )


def signature(message: Message) -> tuple[Any, ...]:
    """What two messages of the same layout have in common; cheap to make and to compare."""
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


class LayoutBook:
    """The sender's numbering of the layouts that have gone over an edge."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[int, Layout]] = {}

    def enter(self, message: Message) -> tuple[int, Layout, bytes]:
        """The layout's number, the layout, and what the receiver must be told of it (nothing if it knows it)."""
        key = signature(message)
        known = self._known.get(key)
        if known is not None:
            return *known, b""
        if len(self._known) >= MOST_LAYOUTS:
            self._known.clear()
        layout = layout_of(message)
        self._known[key] = len(self._known), layout
        return *self._known[key], layout.to_bytes()


class Views:
    """The tensors that layouts find in one frame's memory, made once for each layout."""

    def __init__(self, frame: Tensor) -> None:
        self._frame = frame
        self._known: dict[tuple[int, int], tuple[Layout, list[Tensor]]] = {}

    def of(self, start: int, layout: Layout) -> list[Tensor]:
        """The tensors of a payload that begins at byte `start`."""
        key = (start, id(layout))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_LAYOUTS:
                self._known.clear()
            # The layout is kept so that its id stays its own.
            known = self._known[key] = layout, layout.views(self._frame[start:])
        return known[1]
