"""A name for each start of torchrun's processes, unique in the store that outlives them.

torchrun's agent keeps one store over restarts (unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), with the addresses of processes
that are gone, to which torch 2.13 would connect. TORCHELASTIC_RESTART_COUNT does not identify a start: each host's agent
counts for itself, and only restarts after a failure of its processes.

So rank 0 makes a name and publishes it, each other process writes a token below that name, and rank 0 answers with all
tokens. A process that read the name of an earlier start does not find its token in the answer, and reads the name again.
"""

from __future__ import annotations

import os
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch does not annotate it

_NEWEST = "penstock/newest"
_POLL_INTERVAL = 0.05  # seconds


def store_of_this_start(rank: int, size: int, timeout: timedelta) -> PrefixStore | None:
    """Return the store through which torchrun's processes meet; None if torch makes a new one for each start."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    return PrefixStore(name_of_this_start(store, rank, size, timeout), store)


def name_of_this_start(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that only the processes of this start share; each of them calls it."""
    token = uuid4().hex
    if rank == 0:
        name = f"penstock/{token}"
        store.set(_NEWEST, name)
        keys = [f"{name}/{other}" for other in range(1, size)]
        if keys:
            store.wait(keys, timeout)
        store.set(f"{name}/all", " ".join(store.get(key).decode() for key in keys))
        return name
    deadline = monotonic() + timeout.total_seconds()
    store.wait([_NEWEST], timeout)
    while True:
        name = str(store.get(_NEWEST).decode())
        store.set(f"{name}/{rank}", token)
        if _is_answered(store, name, token, deadline):
            return name


def _is_answered(store: Any, name: str, token: str, deadline: float) -> bool:
    """Wait until rank 0 answers to a token below a name; return False if it has published another name."""
    answer = f"{name}/all"
    while store.get(_NEWEST).decode() == name:
        if monotonic() > deadline:
            raise RuntimeError("rank 0 did not come in time, or not all the other ranks did")
        # An earlier start's has not the token. Torch would print a line for each wait that ends without an answer.
        if store.check([answer]) and token in store.get(answer).decode().split():
            return True
        sleep(_POLL_INTERVAL)
    return False
