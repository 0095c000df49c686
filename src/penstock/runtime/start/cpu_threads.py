"""CPU threads of a rank: the number that the user chose, or a share of the cores that all processes of the run have.

Ranks compute at the same time. With more threads than cores, every operation waits for its last thread, and that thread for
a core: two processes that each take all cores of a machine are several times slower than two that share them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.base import host

Exchange = Callable[[Any], list[Any]]
"""Function that returns every process's value, by rank; every process calls it."""


def omp_threads() -> int:
    """Return OMP_NUM_THREADS, or 0 if the user has not set it; torchrun sets it to 1 by itself."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    if text == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        return 0
    return int(text) if text.isascii() and text.isdigit() else 0


def cpu_threads(exchange: Exchange | None, ranks: int, chosen: int = 0) -> int:
    """Return the CPU threads of each rank of this process, and set them where the process is one rank."""
    return threads_of_ranks(ranks, chosen) if exchange is None else share_cores(exchange, chosen)


def threads_of_ranks(ranks: int, chosen: int = 0, root: Path = host.ROOT) -> int:
    """Return the CPU threads of each rank, where the ranks are threads of this process.

    Args:
        chosen: number that the user chose for a rank; 0 (default) divides ``torch.get_num_threads()``, and where
            OMP_NUM_THREADS is not set, no more than the cgroup's quota allows.
    """
    quota = None if omp_threads() else host.core_quota(root)
    total = torch.get_num_threads() if quota is None else min(torch.get_num_threads(), int(quota))
    return chosen or max(1, total // ranks)


def share_cores(exchange: Exchange, chosen: int = 0, root: Path = host.ROOT) -> int:
    """Set the CPU threads of this process, which is one rank, and return their number; every process of the run calls it.

    Args:
        chosen: number that the user chose; 0 (default) keeps ``torch.get_num_threads()``, but no more than this process's
            share of the cores of its machine unless OMP_NUM_THREADS is set. All processes of the run on one machine share
            its cores, whichever launcher started them, but for cores and quotas that only some may use.
    """
    limits = host.core_limits(root)
    everyone = [host.CoreLimits(*other) for other in exchange(tuple(limits))]
    threads = chosen or torch.get_num_threads()
    if not chosen and not omp_threads():
        threads = min(threads, host.core_share(limits, everyone))
    torch.set_num_threads(threads)
    return threads
