"""The device and the CPU threads of a process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from penstock import host
from penstock.errors import ConfigError
from penstock.runtime.start.launch_environment import has_own_device, local_size, own_device


def choose_device(name: str, *, in_processes: bool) -> torch.device:
    """Return the device of this process's stages.

    Args:
        name: value of ``runtime.device``; empty for the CPU, or for the process's own GPU if each process on this machine
            has one.
        in_processes: True if each rank is a process; ``cuda`` then is the process's own GPU, chosen by its launcher.

    Raises:
        ConfigError: if there is no such device.
    """
    count = torch.cuda.device_count()
    own_index = own_device(count) if in_processes else 0
    if not name:
        name = "cuda" if in_processes and has_own_device(count) else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"runtime.device must be one of cpu, cuda, cuda:0, cuda:1 ..., got {name!r}")
    if device.type == "cuda":
        device = torch.device("cuda", own_index if device.index is None else device.index)
        if device.index >= count:
            raise ConfigError(f"runtime.device is {device}, but PyTorch finds {count} CUDA devices here")
    return device


def _omp_threads() -> int:
    """Return OMP_NUM_THREADS, or 0 if the user has not set it; torchrun sets it to 1 by itself."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    if text == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        return 0
    return int(text) if text.isascii() and text.isdigit() else 0


@contextlib.contextmanager
def sharing_cores(ranks: int, each: int, *, in_processes: bool, root: Path = host.ROOT) -> Iterator[int]:
    """Set the CPU threads of this process until the context ends, and yield the number of threads a rank.

    The pipeline's threads divide the number that is set when they start.

    Args:
        ranks: number of ranks of the pipeline.
        each: threads a rank; 0 for OMP_NUM_THREADS if that is set, else an equal share of the cores that the machine and its
            cgroup (a container's quota) allow.
        in_processes: True if each rank is a process.
        root: root of the file system, for tests; see `penstock.host`.
    """
    before, omp_threads = torch.get_num_threads(), _omp_threads()
    if in_processes:
        each = each or omp_threads or max(1, host.cores(root) // (local_size() or ranks))
        torch.set_num_threads(each)
    else:
        # `before` is the caller's number, OMP_NUM_THREADS, or all cores of the process, whatever its quota.
        quota = None if omp_threads else host.core_quota(root)
        each = each or max(1, int(before if quota is None else min(before, quota)) // ranks)
        torch.set_num_threads(each * ranks)
    try:
        yield each
    finally:
        torch.set_num_threads(before)
