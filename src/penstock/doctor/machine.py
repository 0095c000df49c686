"""Facts about one process's machine: versions, cores, memory, devices and limits, as plain values."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.base import host
from penstock.base.errors import first_line
from penstock.base.version import __version__
from penstock.runtime.health.peers import supported
from penstock.runtime.start.cpu_threads import omp_threads
from penstock.runtime.start.launch_environment import local_rank, own_device
from penstock.runtime.transport.processes import SWITCH

_TCP, _WINDOW = Path("/proc/sys/net/ipv4"), ("tcp_slow_start_after_idle", "tcp_congestion_control")
_SHM = Path("/dev/shm")


def machine_facts(rank: int) -> dict[str, Any]:
    """Return all facts as plain values that JSON can hold: sizes in bytes, None for anything the system does not tell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory, limits = host.memory(), host.core_limits()
    devices, trouble = cuda_devices()
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "machine": limits.machine,
        "versions": versions(),
        "cores": len(limits.cpus),
        "core_quota": host.core_quota(),
        "core_limits": tuple(limits),
        "omp_threads": omp_threads(),
        "memory": memory and memory.total,
        "memory_available": memory and memory.available,
        "devices": devices,
        "device_trouble": trouble,
        "local_rank": local_rank(),
        "open_files": None if soft == resource.RLIM_INFINITY else soft,
        "open_files_most": None if hard == resource.RLIM_INFINITY else hard,
        "shm": shm(),
        "forgets_window": forgets_window(),
        "shared_memory": no_shared_memory(),
    }


def add_threads(machines: Mapping[int, dict[str, Any]]) -> None:
    """Add ``threads`` to each rank's facts: the CPU threads that it gets in `penstock train`, if it is a process."""
    limits = {rank: host.CoreLimits(*one["core_limits"]) for rank, one in machines.items()}
    for rank, one in machines.items():
        one["threads"] = one["omp_threads"] or host.core_share(limits[rank], list(limits.values()))


def versions() -> dict[str, str]:
    """Return the versions of everything that takes part in a run, with CUDA and NCCL if there is a GPU."""
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "penstock": __version__,
    }
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
        with contextlib.suppress(AttributeError, RuntimeError):  # a build without NCCL
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def no_shared_memory() -> str:
    """Return why messages within the machine cannot go through shared memory; empty if they can."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH} is 0"
    return "" if supported() else "it needs Linux on x86-64"


def shm() -> int | None:
    """Return the size of ``/dev/shm`` in bytes, through which NCCL sends within a machine; None if there is none."""
    try:
        filesystem = os.statvfs(_SHM)
    except OSError:
        return None
    return filesystem.f_blocks * filesystem.f_frsize


def forgets_window() -> bool:
    """Return whether TCP starts slowly again after a pause; with BBR, or with the setting off, it does not."""
    try:
        starts, control = ((_TCP / name).read_text().strip() for name in _WINDOW)
    except OSError:
        return False
    return starts == "1" and control != "bbr"


def cuda_devices() -> tuple[list[dict[str, Any]], str]:
    """Return the GPUs that torch finds, and the error that this process's own GPU made in a test; empty if none."""
    count = torch.cuda.device_count()
    devices = []
    try:
        for number in range(count):
            device = torch.cuda.get_device_properties(number)
            capability = f"{device.major}.{device.minor}"
            devices.append({"name": device.name, "memory": device.total_memory, "capability": capability})
        if count:
            own = torch.device("cuda", own_device(count) % count)
            ones = torch.ones(64, 64, device=own)
            # 64 x 64 entries, each the sum of 64 ones.
            if float((ones @ ones).sum()) != 64.0**3:
                return devices, f"{own} computes wrong results"
    except RuntimeError as error:
        return devices, first_line(error)
    return devices, ""
