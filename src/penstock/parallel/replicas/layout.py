"""Assignment of gradients to buckets, in the order in which they become ready.

Pure data: every replica makes the same plan from the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

# The sizes of torch's DistributedDataParallel: smaller buckets pay the latency of a collective more often, larger ones
# start later and leave less of the backward to overlap with.
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the first reduction starts early."""

ALIGNMENT_BYTES = 64
"""Every gradient begins at a multiple of this in its buffer, as fresh tensors do."""


@dataclass(frozen=True)
class Slot:
    """Size and kind of one gradient in a buffer.

    Attributes:
        group: key of the group; only slots of equal groups share a bucket (default None).
        owner: replica that gets the whole sum, with ZeRO; None if each gets a part (default). Only slots of one owner share
            a bucket.
        parts: number of equal parts that a buffer with it must divide into (default 1).
    """

    elements: int
    dtype: torch.dtype
    device: torch.device
    group: Hashable = None
    owner: int | None = None
    parts: int = 1

    @property
    def bytes(self) -> int:
        """Size of the gradient in bytes."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Layout of one bucket.

    Attributes:
        starts: offset of each slot in the buffer, in elements.
        elements: number of elements in the buffer, padding included.
    """

    members: tuple[int, ...]
    starts: tuple[int, ...]
    elements: int
    dtype: torch.dtype
    device: torch.device
    group: Hashable = None
    owner: int | None = None


def plan_buckets(
    slots: Sequence[Slot],
    order: Sequence[int],
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> list[BucketPlan]:
    """Divide slots into buckets, in the order in which the buckets will be full.

    A bucket closes when the next gradient would not fit. A gradient as large as a bucket gets its own, and the small
    ones around it stay together.
    """
    place = {slot: n for n, slot in enumerate(order)}
    full: list[list[int]] = []
    open_: dict[tuple[Hashable, ...], list[int]] = {}
    limit = min(first_bucket_bytes, bucket_bytes)
    for number in order:
        slot = slots[number]
        key = (slot.dtype, slot.device, slot.group, slot.owner, slot.parts)
        if slot.bytes >= limit:
            full.append([number])
            limit = bucket_bytes
            continue
        members = open_.setdefault(key, [])
        if sum(slots[n].bytes for n in members) + slot.bytes > limit:
            full.append(members)
            limit = bucket_bytes
            members = open_[key] = []
        members.append(number)
    full += [members for members in open_.values() if members]
    # A bucket is ready with its last gradient, and buckets are reduced in this order: one ready early must not wait.
    full.sort(key=lambda members: place[members[-1]])
    return [_plan_bucket(slots, members) for members in full]


def _plan_bucket(slots: Sequence[Slot], members: Sequence[int]) -> BucketPlan:
    first = slots[members[0]]
    step = max(1, ALIGNMENT_BYTES // first.dtype.itemsize)
    starts, end = [], 0
    for number in members:
        starts.append(end)
        end += -(-slots[number].elements // step) * step
    # With ZeRO every replica's part has the same size, as reduce-scatter requires, and begins aligned.
    end = -(-end // (first.parts * step)) * first.parts * step
    return BucketPlan(
        members=tuple(members),
        starts=tuple(starts),
        elements=end,
        dtype=first.dtype,
        device=first.device,
        group=first.group,
        owner=first.owner,
    )
