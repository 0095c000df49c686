"""Cores and memory of this process, from files as Linux writes them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from penstock.base import host

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"
TOTAL, AVAILABLE = 16_000_000 << 10, 8_000_000 << 10
V2 = "0::/jobs/one\n"
V1 = "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n"


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A root with the memory of a machine, the groups of this process, and files of groups."""
    written = {f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()}
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups, **written}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# A container with its own namespace sees its group as the root; in version 1 the path is the host's, the mount its own.
@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("", {}, None),
        (V2, {"jobs/one/cpu.max": "max 100000"}, None),
        (V2, {"jobs/one/cpu.max": "250000 100000"}, 2.5),
        (V2, {"jobs/one/cpu.max": "800000 100000", "jobs/cpu.max": "300000 100000"}, 3.0),
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/../other\n", {"cpu.max": "150000 100000"}, 1.5),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 2.0),
        (
            V1,
            {
                "cpu/docker/abc/cpu.cfs_quota_us": "50000",
                "cpu/docker/abc/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
    ],
    ids=["none", "v2 max", "v2", "v2 above", "v2 root", "v2 outside", "v1 container", "v1 host"],
)
def test_the_quota_is_the_smallest_of_the_groups_above(
    tmp_path: Path, groups: str, files: dict[str, str], quota: float | None
):
    root = tree(tmp_path, groups, files)
    assert host.core_quota(root) == quota
    mine = len(os.sched_getaffinity(0))
    assert host.cores(root) == (mine if quota is None else max(1, min(mine, int(quota))))


@pytest.mark.parametrize(
    ("groups", "files", "memory"),
    [
        ("", {}, (TOTAL, AVAILABLE)),
        (V2, {"jobs/one/memory.max": "max"}, (TOTAL, AVAILABLE)),
        (V2, {"jobs/memory.max": "4000", "jobs/memory.current": "1000"}, (4000, 3000)),
        (V1, {"memory/memory.limit_in_bytes": "2000", "memory/memory.usage_in_bytes": "500"}, (2000, 1500)),
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712"}, (TOTAL, AVAILABLE)),
    ],
    ids=["none", "v2 max", "v2 above", "v1", "v1 without a limit"],
)
def test_the_memory_is_the_machines_or_the_groups(
    tmp_path: Path, groups: str, files: dict[str, str], memory: tuple[int, int]
):
    assert host.memory(tree(tmp_path, groups, files)) == memory


def test_without_files_there_is_no_limit(tmp_path: Path):
    assert host.core_quota(tmp_path) is None
    assert host.memory(tmp_path) is None


def test_the_loopback_interface_is_one_of_this_machine():
    assert host.loopback() in {name for _, name in socket.if_nameindex()}
