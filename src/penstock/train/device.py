"""The device and the CPU threads of a process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from penstock.base import host
from penstock.base.errors import ConfigError
from penstock.runtime.start.cpu_threads import omp_threads, threads_of_ranks
from penstock.runtime.start.launch_environment import has_own_device, own_device


def choose_device(name: str, *, in_processes: bool) -> torch.device:
    """Return the device of this process's stages."""
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


@contextlib.contextmanager
def sharing_cores(ranks: int, each: int, *, in_processes: bool, root: Path = host.ROOT) -> Iterator[int]:
    """Set the CPU threads of this process until the context ends, and yield the number of threads per rank.

    The pipeline's threads divide the number that is set when they start. In processes, a pipeline lowers it to the process's
    share of the machine's cores (`penstock.runtime.start.cpu_threads.share_cores`).

    Args:
        each: threads per rank; 0 for OMP_NUM_THREADS if that is set, else for as many as the process's cores and its
            cgroup's quota (a container's) allow, divided among ranks that are threads.
    """
    before = torch.get_num_threads()
    if in_processes:
        each = each or omp_threads() or host.cores(root)
        torch.set_num_threads(each)
    else:
        # `before` is the caller's number, OMP_NUM_THREADS, or all cores of the process, whatever its quota.
        each = threads_of_ranks(ranks, each, root)
        torch.set_num_threads(each * ranks)
    try:
        yield each
    finally:
        torch.set_num_threads(before)
