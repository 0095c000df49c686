"""Choice of the network interface for gloo's connections, where the host's own name does not tell.

Gloo listens on the address of the host's name. On many systems that is a loopback address: Debian writes ``127.0.1.1 NAME``
to ``/etc/hosts``, and torch falls back to the loopback interface if the name is unknown. Other hosts cannot reach that.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address

from penstock.host import loopback
from penstock.runtime.start.launchers import Launch

VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the name of the interface; gloo reads it."""

_LOCAL = ("127.0.0.1", "localhost", "::1")
_GET_ADDRESS, _ANY_PORT = 0x8915, 9  # SIOCGIFADDR of Linux; no packet is sent to the port


def choose_interface(launch: Launch | None) -> None:
    """Set `VARIABLE` where the user has not: to the loopback interface for a run on one machine, else where it is needed.

    It is needed if the host's name does not resolve to an address that other hosts can reach. The interface is then the one
    towards the host of rank 0, or the only one with an address besides loopback. With several the choice remains gloo's.
    """
    if launch is None or VARIABLE in os.environ:
        return
    if launch.address in _LOCAL:
        os.environ[VARIABLE] = loopback()
    elif launch.local_size != launch.size and not _is_reachable(address_of_name()):
        name = interface_towards(launch.address)
        if name:
            os.environ[VARIABLE] = name


def address_of_name() -> str:
    """Return the address on which gloo listens by itself, that of the host's name; empty if it has none here."""
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
