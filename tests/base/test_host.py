"""Cores and memory of this process, from files as Linux writes them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from penstock.base import host

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "0::/jobs/one\n"
V1 = "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/jobs/one/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/jobs/one/cpu.max": "250000 100000\n"}, 2.5),
        # The group above allows less.
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/jobs/one/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/jobs/cpu.max": "300000 100000\n",
            },
            3.0,
        ),
        # A container with its own namespace sees its group as the root.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        # Version 1, in a container: the path is the host's, the mount is the container's.
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
    ],
    ids=["none", "v2 max", "v2", "v2 above", "v2 root", "v2 outside", "v1 container", "v1 host"],
)
def test_the_quota_is_the_smallest_of_the_groups_above(
    tmp_path: Path, files: dict[str, str], quota: float | None
):
    root = tree(tmp_path, files)
    assert host.core_quota(root) == quota
    mine = len(os.sched_getaffinity(0))
    assert host.cores(root) == (mine if quota is None else max(1, min(mine, int(quota))))


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({}, (16_000_000 << 10, 8_000_000 << 10)),
        (
            {"proc/self/cgroup": V2, "sys/fs/cgroup/jobs/one/memory.max": "max\n"},
            (16_000_000 << 10, 8_000_000 << 10),
        ),
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/jobs/memory.max": "4000000000\n",
                "sys/fs/cgroup/jobs/memory.current": "1000000000\n",
            },
            (4_000_000_000, 3_000_000_000),
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "500000000\n",
            },
            (2_000_000_000, 1_500_000_000),
        ),
        (
            {"proc/self/cgroup": V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
            (16_000_000 << 10, 8_000_000 << 10),
        ),
    ],
    ids=["none", "v2 max", "v2 above", "v1", "v1 without a limit"],
)
def test_the_memory_is_the_machines_or_the_groups(
    tmp_path: Path, files: dict[str, str], memory: tuple[int, int]
):
    assert host.memory(tree(tmp_path, files)) == memory


def test_without_files_there_is_no_limit(tmp_path: Path):
    assert host.core_quota(tmp_path) is None
    assert host.memory(tmp_path) is None


def test_the_loopback_interface_is_one_of_this_machine():
    assert host.loopback() in {name for _, name in socket.if_nameindex()}
