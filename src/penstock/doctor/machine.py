"""What one process sees of its machine: versions, cores, memory, devices and limits, as plain values."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock
from penstock import host
from penstock.runtime.health.peers import supported
from penstock.runtime.start.launch_environment import local_rank, own_device
from penstock.runtime.transport.processes import SWITCH

_TCP, _WINDOW = Path("/proc/sys/net/ipv4"), ("tcp_slow_start_after_idle", "tcp_congestion_control")
_SHM = Path("/dev/shm")


def look(rank: int) -> dict[str, Any]:
    """All of it; plain values that JSON can hold.

    Sizes are in bytes. What the system does not tell is None.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = host.memory()
    devices, trouble = cuda_devices()
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "machine": machine(),
        "versions": versions(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "core_quota": host.core_quota(),
        "memory": memory and memory.total,
        "memory_available": memory and memory.available,
        "devices": devices,
        "device_trouble": trouble,
        "local_rank": local_rank(),
        "open_files": None if soft == resource.RLIM_INFINITY else soft,
        "open_files_most": None if hard == resource.RLIM_INFINITY else hard,
        "shm": shm(),
        "forgets_window": forgets_window(),
        "shared_memory": shares(),
    }


def versions() -> dict[str, str]:
    """Of what takes part in a run; NCCL's where there is a GPU."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "penstock": penstock.__version__,
    }
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        with contextlib.suppress(AttributeError, RuntimeError):  # a build without NCCL
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch does not annotate it
    return found


def machine() -> str:
    """The same text for processes on one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def shares() -> str:
    """Why messages within the machine cannot go through shared memory; empty if nothing here speaks against it."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH} is 0"
    return "" if supported() else "it needs Linux on x86-64"


def shm() -> int | None:
    """Size of ``/dev/shm``, through which NCCL talks within a machine."""
    try:
        place = os.statvfs(_SHM)
    except OSError:
        return None
    return place.f_blocks * place.f_frsize


def forgets_window() -> bool:
    """Whether TCP starts slowly again after a pause: with BBR, or with the setting off, it does not."""
    try:
        starts, control = ((_TCP / name).read_text().strip() for name in _WINDOW)
    except OSError:
        return False
    return starts == "1" and control != "bbr"


def cuda_devices() -> tuple[list[dict[str, Any]], str]:
    """The GPUs that torch finds, and what went wrong when this process's own was asked to compute."""
    count = torch.cuda.device_count()
    found = []
    try:
        for number in range(count):
            has = torch.cuda.get_device_properties(number)
            found.append(
                {"name": has.name, "memory": has.total_memory, "capability": f"{has.major}.{has.minor}"}
            )
        if count:
            own = torch.device("cuda", own_device(count) % count)
            ones = torch.ones(64, 64, device=own)
            if float((ones @ ones).sum()) != 64.0**3:
                return found, f"{own} computes wrong results"
    except RuntimeError as error:
        return found, str(error).splitlines()[0]
    return found, ""


def open_now() -> int:
    """How many files, sockets among them, this process has open."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
