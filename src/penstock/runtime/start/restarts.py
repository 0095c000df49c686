"""Names of its own for each start of torchrun's processes in the store that outlives them.

torchrun's agent keeps one store over restarts (unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), and in it the addresses of
processes that are gone, which torch 2.13 would connect to. TORCHELASTIC_RESTART_COUNT does not tell the starts apart: each
host's agent counts for itself, and only the restarts for which a process of its own had failed.

So rank 0 makes a name and publishes it, each process leaves a word of its own below the name, and rank 0 answers with all
the words. A process that found the name of an earlier start does not find its word in that answer, and looks for the next.
"""

from __future__ import annotations

import os
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from torch.distributed import DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch does not annotate it

_NEWEST = "penstock/newest"
_LOOK = 0.05  # seconds


def store_of_this_start(rank: int, size: int, timeout: timedelta) -> PrefixStore | None:
    """What torchrun's processes meet through; None where the store is new for each start, and torch makes it.

    Raises:
        RuntimeError: as torch's stores raise, or not all processes came in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    return PrefixStore(name_of_this_start(store, rank, size, timeout), store)


def name_of_this_start(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """A name that the processes of this start have in common, and those of no other start; each of them calls it.

    Args:
        store: of ``torch.distributed``, with whatever earlier starts left in it.
        rank, size: of this process, and how many there are.
        timeout: the longest that this may take.

    Raises:
        RuntimeError: not all processes came in time.
    """
    word = uuid4().hex
    if rank == 0:
        name = f"penstock/{word}"
        store.set(_NEWEST, name)
        answers = [f"{name}/{other}" for other in range(1, size)]
        if answers:
            store.wait(answers, timeout)
        store.set(f"{name}/all", " ".join(store.get(answer).decode() for answer in answers))
        return name
    until = monotonic() + timeout.total_seconds()
    store.wait([_NEWEST], timeout)
    while True:
        name = str(store.get(_NEWEST).decode())
        store.set(f"{name}/{rank}", word)
        if _is_answered(store, name, word, until):
            return name


def _is_answered(store: Any, name: str, word: str, until: float) -> bool:
    """Whether rank 0 answers to a word below a name; not, if it has made another name."""
    answer = f"{name}/all"
    while store.get(_NEWEST).decode() == name:
        if monotonic() > until:
            raise RuntimeError("rank 0 did not come in time, or not all the others did")
        try:
            store.wait([answer], timedelta(seconds=_LOOK))
        except DistStoreError:
            continue  # not yet
        if word in store.get(answer).decode().split():
            return True
        sleep(_LOOK)  # of an earlier start; this one's rank 0 has yet to come
    return False
