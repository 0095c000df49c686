"""How many cores and how much memory this process may use: the machine's, or less where its cgroup (a container) says so.

cgroups of version 1 and 2, with the limits of all groups above: the smallest counts. Every function takes the folder below
which ``/proc`` and ``/sys`` are found.
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
    """Bytes of memory: all that this process may ever have, and what of it is free now."""

    total: int
    available: int


def cores(root: Path = ROOT) -> int:
    """Cores that this process can keep busy: those it may run on, or whole cores of its quota, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota(root)
    return affinity if quota is None else max(1, min(affinity, math.floor(quota)))


def core_quota(root: Path = ROOT) -> float | None:
    """How many cores' time the cgroup gives; None without a limit."""
    return min(_quotas(root), default=None)


def memory(root: Path = ROOT) -> Memory | None:
    """The memory; None where the system does not tell."""
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
        except (OSError, ValueError):  # of version 1, or "max"
            allowed = _number(group / "cpu.cfs_quota_us") or 0
            period = _number(group / "cpu.cfs_period_us") or 0
        if allowed > 0 and period > 0:
            yield allowed / period


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the groups that limit this process, from its own up; some may not be there."""
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
        own = PurePosixPath(path.lstrip("/"))
        # A container sees its own group where the topmost is mounted, whatever path the host gave it.
        inside = [] if ".." in own.parts else [own, *own.parents]
        for base in dict.fromkeys(bases):
            yield from dict.fromkeys(base / part for part in (*inside, PurePosixPath()))


def _number(path: Path) -> int | None:
    """A number in a file of the system; None if there is none, or it says that there is no limit."""
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None
    return value if value >= 0 else None


def to_stderr(text: str) -> None:
    """Print a line to stderr, for the launcher or a run that has no reporter yet."""
    print(f"penstock: {text}", file=sys.stderr, flush=True)
