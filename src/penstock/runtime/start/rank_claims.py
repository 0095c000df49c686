"""Check of ranks where processes meet: each rank comes once, and all agree on the number of processes and the job.

A launcher's script may give several processes the same RANK, and two runs may meet at the same address and port. Torch would
then wait for the ranks that never come until its timeout, or connect processes of different runs.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from functools import cache
from threading import Thread
from time import monotonic, sleep
from uuid import uuid4

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not annotate it

from penstock.base.errors import ConfigError, WaitTimeoutError, first_line

_PREFIX = "penstock/ranks"
_CONFLICT = f"{_PREFIX}/conflict"
_COUNT = f"{_PREFIX}/count"
_FIRST_INTERVAL = 0.01  # seconds between two looks at the store
_LONGEST_INTERVAL = 0.5  # seconds: one store serves every process
_GRACE = 2.0  # seconds
_SOON = timedelta(seconds=10)  # longest wait for another rank 0, which has come already if there is one


def open_store(address: str, port: int, rank: int, size: int, timeout: timedelta, job: str = "") -> TCPStore:
    """Open the store of a run: rank 0 serves it, the others connect to it. Return it once every rank has come."""
    deadline = monotonic() + timeout.total_seconds()
    store: TCPStore | None
    try:
        store = _connect(address, port, rank == 0, timeout)
    except RuntimeError as error:
        if rank != 0:
            raise
        store = _other_server(address, port)
        if store is None:
            raise RuntimeError(f"{first_line(error)}; is MASTER_PORT free on the host of rank 0?") from error
    where = f"{address} port {port}"
    try:
        _claim(store, rank, size, where, job)
        _wait_for_all(store, size, where, deadline, timeout.total_seconds())
    except ConfigError:
        if rank == 0:
            sleep(_GRACE)  # the store ends with rank 0, and the others shall read the message first
        raise
    return store


def _connect(address: str, port: int, is_server: bool, timeout: timedelta) -> TCPStore:
    return TCPStore(
        address, port, is_master=is_server, timeout=timeout, wait_for_workers=False, multi_tenant=True
    )


def _other_server(address: str, port: int) -> TCPStore | None:
    """Return the store of another rank 0 that has the port, so that both are told; None if there is none."""
    found: list[TCPStore] = []

    def look() -> None:
        with suppress(RuntimeError):
            store = _connect(address, port, False, _SOON)
            store.wait([f"{_PREFIX}/0"], _SOON)
            found.append(store)

    # A program that accepts connections and says nothing would keep torch waiting for ever.
    thread = Thread(target=look, daemon=True)
    thread.start()
    thread.join(_SOON.total_seconds())
    return found[0] if found else None


def _claim(store: TCPStore, rank: int, size: int, where: str, job: str) -> None:
    """Write this process below its rank; raise, and tell the others, if another one has."""
    first_size = store.compare_set(f"{_PREFIX}/size", "", str(size)).decode()
    if first_size != str(size):
        _refuse(
            store,
            f"the processes that meet at {where} do not agree on their number: {_own_name()} says {size}, another one "
            f"{first_size}; start all of them with the same WORLD_SIZE, and give each run its own MASTER_PORT",
        )
    own_job = job or "a job without a name"
    first_job = store.compare_set(f"{_PREFIX}/job", "", own_job).decode()
    if first_job != own_job:
        _refuse(
            store,
            f"processes of two jobs meet at {where}: {_own_name()} is of {own_job}, another one of {first_job}; give each "
            "run its own MASTER_PORT",
        )
    key = f"{_PREFIX}/{rank}"
    is_new = not store.check([key])
    first = store.compare_set(key, "", f"{_token()} {_own_name()}").decode()
    token, _, name = first.partition(" ")
    if token != _token():
        _refuse(
            store,
            f"rank {rank} of {size} came twice to {where}: {name} and {_own_name()}; give each process its own RANK, from 0 "
            f"to {size - 1}, and each run its own MASTER_PORT",
        )
    if is_new:
        store.add(_COUNT, 1)


def _refuse(store: TCPStore, message: str) -> None:
    store.set(_CONFLICT, message)
    raise ConfigError(message)


def _wait_for_all(store: TCPStore, size: int, where: str, deadline: float, seconds: float) -> None:
    interval = _FIRST_INTERVAL
    while store.add(_COUNT, 0) < size:
        if store.check([_CONFLICT]):
            raise ConfigError(store.get(_CONFLICT).decode())
        if monotonic() > deadline:
            missing = [str(rank) for rank in range(size) if not store.check([f"{_PREFIX}/{rank}"])]
            named = ", ".join(missing[:16]) + (", …" if len(missing) > 16 else "")
            raise WaitTimeoutError(
                f"the {size} processes did not all meet at {where} within {seconds:g} s: missing rank(s) {named}"
            )
        sleep(interval)
        interval = min(2 * interval, _LONGEST_INTERVAL)


@cache
def _token() -> str:
    """Return a name of this process: a second pipeline of it may meet through the same store."""
    return uuid4().hex


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
