"""Which device a process uses, and how many of the machine's cores."""

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
    """The device of this process's stages.

    Args:
        name: as in ``runtime.device``. Where it is empty: the CPU; but in processes, where there is a GPU for each on
            this machine, its own.
        in_processes: whether the ranks are processes; then ``cuda`` is the process's own, as its launcher says.

    Raises:
        ConfigError: no such device.
    """
    count = torch.cuda.device_count()
    own = own_device(count) if in_processes else 0
    if not name:
        name = "cuda" if in_processes and has_own_device(count) else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"runtime.device {name!r} is none of cpu, cuda, cuda:0, cuda:1 ...")
    if device.type == "cuda":
        device = torch.device("cuda", own if device.index is None else device.index)
        if device.index >= count:
            raise ConfigError(f"runtime.device is {device}, but PyTorch finds {count} CUDA devices here")
    return device


def _asked() -> int:
    """What OMP_NUM_THREADS says; 0 if nothing. The 1 that torchrun sets where it is not set says nothing."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    if text == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        return 0
    return int(text) if text.isascii() and text.isdigit() else 0


@contextlib.contextmanager
def sharing_cores(ranks: int, each: int, *, in_processes: bool, root: Path = host.ROOT) -> Iterator[int]:
    """Set the CPU threads of this process until the end; gives how many a rank has.

    The pipeline's own threads divide what is set when they start.

    Args:
        ranks: of the pipeline.
        each: threads a rank; 0 for OMP_NUM_THREADS of each process where that is set, else a share of the cores that the
            machine and its cgroup (a container's quota) leave to the ranks on it.
        in_processes: whether the ranks are processes.
        root: see `penstock.host`.
    """
    before, asked = torch.get_num_threads(), _asked()
    if in_processes:
        each = each or asked or max(1, host.cores(root) // (local_size() or ranks))
        torch.set_num_threads(each)
    else:
        # What is set is the caller's, OMP_NUM_THREADS, or all cores that the process may run on, quota or not.
        quota = None if asked else host.core_quota(root)
        each = each or max(1, int(before if quota is None else min(before, quota)) // ranks)
        torch.set_num_threads(each * ranks)
    try:
        yield each
    finally:
        torch.set_num_threads(before)
