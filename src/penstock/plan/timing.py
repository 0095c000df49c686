"""Seconds of a layer's operations on a device of a cluster."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.plan.cluster import Device, LinkSpeed
from penstock.plan.profile.layer_cost import DeviceWork


def seconds_of(works: Iterable[DeviceWork], device: Device, dtype: str, group: int, link: LinkSpeed) -> float:
    """Return the seconds of operations that follow each other; collectives run among `group` tensor-parallel ranks."""
    return sum(_seconds(work, device, dtype, group, link) for work in works)


def _seconds(work: DeviceWork, device: Device, dtype: str, group: int, link: LinkSpeed) -> float:
    if work.unit == "seconds":
        return work.amount
    if work.unit in ("all_reduce", "all_gather", "reduce_scatter"):
        return work.calls * collective_seconds(work.unit, work.amount / work.calls, group, link)
    launch = work.calls * device.launch
    if work.unit in ("memory", "scores"):
        bandwidth = device.score_bandwidth if work.unit == "scores" else None
        return launch + work.amount / (bandwidth or device.memory_bandwidth)
    if work.unit == "attention":
        return launch + work.amount / device.attention_rate(dtype)
    return launch + work.amount / device.matmul_rate(dtype, work.width)


def collective_seconds(unit: str, size: float, group: int, link: LinkSpeed) -> float:
    """Return the seconds of a ring collective: "all_reduce", "all_gather" or "reduce_scatter".

    `size` is the bytes of the whole tensor on each rank (before a reduce-scatter, after an all-gather), `link` the
    slowest of the ring.
    """
    if group <= 1:
        return 0.0
    # A ring's all-reduce is a reduce-scatter and then an all-gather.
    rounds = 2 if unit == "all_reduce" else 1
    return rounds * (group - 1) * (link.latency / 2 + size / group / link.bandwidth)
