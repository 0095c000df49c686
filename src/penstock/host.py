"""Cores and memory that this process may use: the machine's, or less where its cgroup (a container) sets a limit.

Supports cgroups of version 1 and 2. The limits of all groups above apply, so the smallest counts. Each function takes the
folder that contains ``/proc`` and ``/sys``.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")


class Memory(NamedTuple):
    """Memory of this process in bytes: its limit, and how much of it is free now."""

    total: int
    available: int


def cores(root: Path = ROOT) -> int:
    """Return the number of cores that this process can keep busy: its affinity or its quota, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota(root)
    return affinity if quota is None else max(1, min(affinity, math.floor(quota)))


def core_quota(root: Path = ROOT) -> float | None:
    """Return the cgroup's quota in cores, possibly a fraction; None without a limit."""
    return min(_quotas(root), default=None)


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


def _quotas(root: Path) -> Iterator[float]:
    for group in _groups("cpu", root):
        try:
            allowed, period = (int(word) for word in (group / "cpu.max").read_text().split())
        except (OSError, ValueError):  # version 1, or "max"
            allowed = _number(group / "cpu.cfs_quota_us") or 0
            period = _number(group / "cpu.cfs_period_us") or 0
        if allowed > 0 and period > 0:
            yield allowed / period


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


def to_stderr(text: str) -> None:
    """Print a line to stderr, for the launcher or a run that has no reporter yet."""
    print(f"penstock: {text}", file=sys.stderr, flush=True)
