"""Meeting of the processes of a run: through a file, or at the address that their launcher says."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # torch does not annotate it

from penstock.base.errors import ConfigError, PeerError, WaitTimeoutError, first_line
from penstock.base.host import loopback
from penstock.runtime.health.hang import Timeout
from penstock.runtime.start.launch_environment import find_launch, meeting_url
from penstock.runtime.start.launchers import Launch
from penstock.runtime.start.rank_claims import open_store
from penstock.runtime.start.restarts import store_of_this_start

STORE = "PENSTOCK_STORE"
"""Environment variable: a file, new for the run, through which the processes of one machine meet. They then listen on the
loopback interface alone."""


INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the name of the network interface; gloo reads it."""

_LOCAL = ("127.0.0.1", "localhost", "::1")
_GET_ADDRESS, _ANY_PORT = 0x8915, 9  # SIOCGIFADDR of Linux; no packet is sent to the port


def meet(rank: int, size: int, timeout: Timeout) -> None:
    """Initialise ``torch.distributed`` through the file in `STORE`, or at the launcher's address."""
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    longest = timedelta(seconds=timeout.longest)
    path = os.environ.get(STORE)
    if path:
        _meet_through_file(path, backends, rank, size, timeout)
        return
    launch = find_launch()
    choose_interface(launch)
    # Even where a store takes its place, since it refuses an address that is missing before anything waits.
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
    os.environ.setdefault(INTERFACE, loopback())
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


def choose_interface(launch: Launch | None) -> None:
    """Set `INTERFACE` where the user has not: to the loopback interface for a run on one machine, else where it is needed.

    Gloo listens on the address of the host's name. On many systems that is a loopback address: Debian writes ``127.0.1.1
    NAME`` to ``/etc/hosts``, and torch falls back to the loopback interface if the name is unknown. Other hosts cannot reach
    that. The interface is then the one
    towards the host of rank 0, or the only one with an address besides loopback. With several the choice remains gloo's.
    """
    if launch is None or INTERFACE in os.environ:
        return
    if launch.address in _LOCAL:
        os.environ[INTERFACE] = loopback()
    elif launch.local_size != launch.size and not _is_reachable(address_of_name()):
        name = interface_towards(launch.address)
        if name:
            os.environ[INTERFACE] = name


def address_of_name() -> str:
    """Return the address of the host's name, on which gloo listens by itself; empty if this host does not have it."""
    with suppress(OSError):
        for family, kind, number, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, number) as one:
                one.bind(address)
                return str(address[0])
    return ""


def interface_towards(host: str) -> str:
    """Return the interface through which this host reaches another; empty if that cannot be told.

    Args:
        host: name or address of the other host. If it is this one, the only interface besides loopback counts.
    """
    by_address = reachable_interfaces()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        address = probe.getsockname()[0]
        if address in by_address:
            return by_address[address]
    return next(iter(by_address.values())) if len(by_address) == 1 else ""


def reachable_interfaces() -> dict[str, str]:
    """Return the interfaces with an IPv4 address that other hosts can reach, by address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # no address
                answer = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                address = socket.inet_ntoa(answer[20:24])
                if _is_reachable(address):
                    found[address] = name
    return found


def _is_reachable(address: str) -> bool:
    return bool(address) and not ip_address(address.partition("%")[0]).is_loopback
