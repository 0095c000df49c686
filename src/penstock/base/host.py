"""Cores and memory that this process may use: the machine's, or less where its cgroup (a container) sets a limit.

Supports cgroups of version 1 and 2. The limits of all groups above apply, so the smallest counts. Each function takes the
folder that contains ``/proc`` and ``/sys``.
"""

from __future__ import annotations

import math
import os
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")


class Memory(NamedTuple):
    """Memory of this process in bytes: its limit, and how much of it is free now."""

    total: int
    available: int


class CoreLimits(NamedTuple):
    """The cores that a process may run on, as plain values that other processes compare with their own."""

    machine: str
    cpus: tuple[int, ...]  # numbers of the cores in the process's affinity
    # Every cgroup above the process that has a quota, by an identifier that all processes in it see alike,
    # and the quota in cores.
    quotas: tuple[tuple[str, float], ...]


def core_limits(root: Path = ROOT) -> CoreLimits:
    """Return the limits of this process."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return CoreLimits(machine(root), tuple(sorted(affinity)), tuple(_quotas(root)))


def core_share(limits: CoreLimits, processes: Sequence[CoreLimits]) -> int:
    """Return the number of cores for one of several processes, so that together they use no core twice; at least 1."""
    here = [other for other in processes if other.machine == limits.machine]
    share = sum(1 / sum(cpu in other.cpus for other in here) for cpu in limits.cpus)
    for group, quota in limits.quotas:
        share = min(share, quota / sum(any(group == one for one, _ in other.quotas) for other in here))
    # Thirds that add up to a whole core may fall short of it by rounding.
    return max(1, math.floor(share + 1e-9))


def cores(root: Path = ROOT) -> int:
    """Return the number of cores that this process can keep busy: its affinity or its quota, at least 1."""
    limits = core_limits(root)
    return core_share(limits, [limits])


def core_quota(root: Path = ROOT) -> float | None:
    """Return the cgroup's quota in cores, possibly a fraction; None without a limit."""
    return min((quota for _, quota in _quotas(root)), default=None)


def machine(root: Path = ROOT) -> str:
    """Return an identifier that all processes on one machine share, and that changes when it is started again."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def clock(root: Path = ROOT) -> str:
    """Return an identifier that all processes share whose ``time.perf_counter`` is one clock: of a machine and its boot."""
    try:
        return f"{machine(root)} {os.readlink(root / 'proc/self/ns/time')}"
    except OSError:  # no Linux, or one without namespaces of time
        return machine(root)


def memory(root: Path = ROOT) -> Memory | None:
    """Return the memory of this process; None if the system does not tell."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, available = table["MemTotal"], table.get("MemAvailable", table["MemFree"])
    for group in _groups("memory", root):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(group / limit_name)
            if limit is not None and limit < total:
                available = min(available, max(0, limit - (_number(group / used_name) or 0)))
                total = limit
    return Memory(total, available)


def process_memory() -> tuple[int, int]:
    """Return this process's memory in RAM, and the most that it has had, in bytes."""
    # macOS counts bytes, Linux KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        # Its second number is the pages in RAM.
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak, peak
    return rss, max(peak, rss)


def utc() -> str:
    """Return the time now as ISO 8601 in UTC, to the millisecond: ``2026-01-31T23:59:59.123Z``."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quotas(root: Path) -> Iterator[tuple[str, float]]:
    """Yield the quotas of the groups that limit this process, with the device and inode of their folders."""
    for group in _groups("cpu", root):
        try:
            allowed, period = (int(word) for word in (group / "cpu.max").read_text().split())
        except (OSError, ValueError):  # version 1, or "max"
            allowed = _number(group / "cpu.cfs_quota_us") or 0
            period = _number(group / "cpu.cfs_period_us") or 0
        if allowed > 0 and period > 0:
            folder = group.stat()
            yield f"{folder.st_dev}:{folder.st_ino}", allowed / period


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of the groups that limit this process, its own first; some may not exist."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        bases = (mount / controllers, mount / controller) if controllers else (mount, mount / "unified")
        group = PurePosixPath(path.lstrip("/"))
        # A container sees its group as the topmost one, although the host gives the path of another.
        inside = [] if ".." in group.parts else [group, *group.parents]
        for base in dict.fromkeys(bases):
            yield from dict.fromkeys(base / part for part in (*inside, PurePosixPath()))


def _number(path: Path) -> int | None:
    """Read a number from a file of the system; None if there is none, or if it means no limit."""
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None
    return value if value >= 0 else None


def loopback() -> str:
    """Return the name of this machine's loopback interface: "lo" on Linux, "lo0" on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def to_stderr(text: str) -> None:
    """Print a line to stderr, for the launcher or a run that has no reporter yet."""
    print(f"penstock: {text}", file=sys.stderr, flush=True)


def open_files() -> int:
    """Return how many files and sockets this process has open; 0 if the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
