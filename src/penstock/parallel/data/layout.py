"""Which gradients share a buffer: parameters, in the order in which their gradients become ready, cut into buckets.

Data only; every replica makes the same plan of the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.errors import ConfigError

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the first reduction starts early."""

ALIGNMENT_BYTES = 64
"""Every gradient begins at a multiple of this in its buffer, as fresh tensors do."""


@dataclass(frozen=True)
class Slot:
    """A gradient to be placed.

    Attributes:
        elements: how many.
        dtype, device: of the gradient.
        group: only slots of equal groups share a bucket.
    """

    elements: int
    dtype: torch.dtype
    device: torch.device
    group: Hashable = None

    @property
    def bytes(self) -> int:
        """Size of the gradient."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """One bucket.

    Attributes:
        members: which slots, in the order of their readiness.
        starts: where each begins in the buffer, in elements.
        elements: of the buffer, padding included.
        dtype, device, group: of all its slots.
    """

    members: tuple[int, ...]
    starts: tuple[int, ...]
    elements: int
    dtype: torch.dtype
    device: torch.device
    group: Hashable = None


def plan_buckets(
    slots: Sequence[Slot],
    order: Sequence[int],
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    parts: int = 1,
    limits: Mapping[Hashable, int] | None = None,
) -> list[BucketPlan]:
    """Cut slots into buckets, which come in the order in which they will be full.

    A bucket closes when the next gradient would not fit. A gradient as large as a bucket gets its own, and the small
    ones around it stay together.

    Args:
        slots: all gradients.
        order: the number of every slot, soonest ready first.
        bucket_bytes, first_bucket_bytes: the most bytes of gradients in a bucket, and in the first one.
        parts: each buffer divides into so many equal parts.
        limits: group → the most bytes in each of its buckets, the first included; others have `bucket_bytes`.

    Raises:
        ConfigError: sizes that are not positive, or an order that does not name every slot once.
    """
    for name, value in (("bucket_bytes", bucket_bytes), ("first_bucket_bytes", first_bucket_bytes)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a positive number of bytes, not {value!r}")
    if sorted(order) != list(range(len(slots))):
        raise ConfigError(f"the order must name each of the {len(slots)} gradients once; it is {list(order)}")
    place = {slot: n for n, slot in enumerate(order)}
    full: list[list[int]] = []
    open_: dict[tuple[Hashable, ...], list[int]] = {}
    usual = min(first_bucket_bytes, bucket_bytes)
    for number in order:
        slot = slots[number]
        limit = (limits or {}).get(slot.group, usual)
        key = (slot.dtype, slot.device, slot.group)
        if slot.bytes >= limit:
            full.append([number])
            usual = bucket_bytes
            continue
        members = open_.setdefault(key, [])
        if sum(slots[n].bytes for n in members) + slot.bytes > limit:
            full.append(members)
            usual = bucket_bytes
            members = open_[key] = []
        members.append(number)
    full += [members for members in open_.values() if members]
    full.sort(key=lambda members: place[members[-1]])
    return [_place(slots, members, parts) for members in full]


def _place(slots: Sequence[Slot], members: Sequence[int], parts: int) -> BucketPlan:
    first = slots[members[0]]
    step = max(1, ALIGNMENT_BYTES // first.dtype.itemsize)
    starts, end = [], 0
    for number in members:
        starts.append(end)
        end += -(-slots[number].elements // step) * step
    end = -(-end // (parts * step)) * parts * step
    return BucketPlan(tuple(members), tuple(starts), end, first.dtype, first.device, first.group)
