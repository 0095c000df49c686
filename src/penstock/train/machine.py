"""Which device a process uses, and how many of the machine's cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from penstock.errors import ConfigError
from penstock.runtime.launch_environment import has_own_device, local_size, own_device


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


@contextlib.contextmanager
def sharing_cores(ranks: int, each: int, *, in_processes: bool) -> Iterator[int]:
    """Set the CPU threads of this process until the end; gives how many a rank has.

    The pipeline's own threads divide what is set when they start.

    Args:
        ranks: of the pipeline.
        each: threads a rank; 0 shares the cores of this machine among the ranks on it.
        in_processes: whether the ranks are processes.
    """
    before = torch.get_num_threads()
    if in_processes:
        beside = local_size() or ranks
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        each = each or max(1, cores // beside)
        torch.set_num_threads(each)
    else:
        each = each or max(1, before // ranks)
        torch.set_num_threads(each * ranks)
    try:
        yield each
    finally:
        torch.set_num_threads(before)
