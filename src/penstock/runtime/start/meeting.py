"""Meeting of the processes of a run: through a file, or at the address that their launcher says."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # torch does not annotate it

from penstock.errors import ConfigError, PeerError, WaitTimeoutError, first_line
from penstock.host import loopback
from penstock.runtime.start.interface import choose_interface
from penstock.runtime.start.launch_environment import find_launch, meeting_url
from penstock.runtime.start.rank_claims import open_store
from penstock.runtime.start.restarts import store_of_this_start
from penstock.runtime.workers.timeout import Timeout

STORE = "PENSTOCK_STORE"
"""Environment variable: a file, new for the run, through which the processes of one machine meet. They then listen on the
loopback interface alone."""


def meet(rank: int, size: int, timeout: Timeout) -> None:
    """Initialise ``torch.distributed`` through the file in `STORE`, or at the launcher's address.

    Args:
        timeout: timeout of the run; the longest one is that of the process group.

    Raises:
        ConfigError: if no address is set; says which variables to set.
        WaitTimeoutError, RuntimeError: if not all processes come in time.
    """
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    longest = timedelta(seconds=timeout.longest)
    path = os.environ.get(STORE)
    if path:
        _meet_through_file(path, backends, rank, size, timeout)
        return
    launch = find_launch()
    choose_interface(launch)
    url = meeting_url()
    with named_errors(f"the {size} processes did not all meet{_launcher_rank()}"):
        store: Store | None = store_of_this_start(rank, size, longest)
        if store is None and launch is not None:
            store = open_store(launch.address, launch.port, rank, size, longest, launch.job)
        dist.init_process_group(
            backends,
            None if store is not None else url,
            store=store,
            rank=rank,
            world_size=size,
            timeout=longest,
        )


def _meet_through_file(path: str, backends: str, rank: int, size: int, timeout: Timeout) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    if not os.access(Path(path).parent, os.W_OK):  # the store would try for minutes to open it
        raise ConfigError(
            f"{STORE}={path}: that folder is not there, or cannot be written to; name a file that is new for this "
            "run, the same for all its processes"
        )
    longest = timedelta(seconds=timeout.longest)
    try:
        store = FileStore(path, size)
        store.set_timeout(longest)
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=longest)
    except RuntimeError as error:
        raise WaitTimeoutError(
            f"rank {rank} did not meet all {size} processes through {STORE}={path} within "
            f"{timeout.seconds:g} s: {first_line(error)}"
        ) from error


def _launcher_rank() -> str:
    """Describe the rank that the launcher gives this process, unless it comes from RANK and WORLD_SIZE."""
    launch = find_launch()
    if launch is None or launch.from_torch:
        return ""
    return f" (this one is rank {launch.rank} of {launch.launcher}, at {launch.address} port {launch.port})"


@contextlib.contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Raise errors of ``torch.distributed`` about processes that are gone or never came as PeerError."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"{what}: {first_line(error)}") from error
