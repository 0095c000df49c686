"""The first process of a host: makes the host, then starts processes on it and says how they ended.

It is a fork of one process for all hosts, which has imported what their processes need, and has one thread. In new
namespaces it makes the network cards, hands them over to the network, and mounts the host's own ``/tmp``, ``/dev/shm`` and
``/etc/hosts``. A process that calls a function is a fork of it in turn.

When this process ends, the kernel ends all others of the host.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.hosts.cable import address
from tests.support.hosts.spaces import enter, mount

MTU = 8900
_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
_SET_ADDRESS, _SET_MASK, _SET_FLAGS, _SET_MTU, _SET_HARDWARE = 0x8916, 0x891C, 0x8914, 0x8922, 0x8924
_UP_RUNNING, _ETHER = 0x41, 1


def ip(network: int, host: int) -> str:
    """The address of a host in a network; hosts and networks count from 0."""
    return f"10.77.{network}.{host + 1}"


def own_files(kept: list[str], names: str, scratch: str) -> None:
    """Mount an empty ``/tmp``, where folders to keep stay visible, ``/dev/shm``, ``/etc/hosts``, and a machine's number."""
    stage = Path(scratch)
    mount("-t", "tmpfs", "-o", "size=512m", "tmpfs", str(stage))
    for folder in kept:
        with suppress(ValueError):
            inside = stage / Path(folder).relative_to("/tmp")
            inside.mkdir(parents=True, exist_ok=True)
            mount("--rbind", folder, str(inside))
    mount("--rbind", str(stage), "/tmp")
    mount("-t", "tmpfs", "-o", "size=512m", "tmpfs", "/dev/shm")
    mount("--bind", names, "/etc/hosts")
    machine = stage / "boot_id"
    machine.write_text(f"{uuid.uuid4()}\n")
    mount("--bind", str(machine), "/proc/sys/kernel/random/boot_id")


def card(network: int, host: int) -> int:
    """Make a network card; return the descriptor of its other end."""
    name = f"eth{network}".encode()
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name, _TAP_WITHOUT_HEADER))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:

        def ask(request: int, form: str, *values: Any) -> None:
            fcntl.ioctl(any_socket, request, struct.pack("16s" + form, name, *values))

        def inet(text: str) -> tuple[Any, ...]:
            return socket.AF_INET, socket.inet_aton(text)

        ask(_SET_HARDWARE, "H6s16x", _ETHER, address(network, host))
        ask(_SET_MTU, "i20x", MTU)
        ask(_SET_ADDRESS, "H2x4s16x", *inet(ip(network, host)))
        ask(_SET_MASK, "H2x4s16x", *inet("255.255.255.0"))
        ask(_SET_FLAGS, "H22x", _UP_RUNNING)
    return descriptor


def loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP_RUNNING))


class Agent:
    """The host's processes, and what the test asks for.

    Args:
        control: socket to the test; one packet is one order or one report.
    """

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self._numbers: dict[int, int] = {}

    def serve(self) -> Callable[[], object]:
        """Follow orders until the test closes the socket; returns in each process that is to call a function, with it."""
        reader, writer = os.pipe2(os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self.control, reader], [], [])
            if reader in ready:
                os.read(reader, 4096)
                self._report()
            if self.control in ready:
                data = self.control.recv(1 << 16)
                if not data:
                    os._exit(0)
                job = self._follow(json.loads(data))
                if job is not None:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return job

    def _report(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                number = self._numbers.pop(ended[0], None)
                if number is not None:  # else a process that lost its parent
                    code = os.waitstatus_to_exitcode(ended[1])
                    self.control.send(json.dumps([number, code]).encode())

    def _follow(self, order: dict[str, Any]) -> Callable[[], object] | None:
        if "signal" in order:
            with suppress(ProcessLookupError):
                os.kill(-1, order["signal"])  # all processes of the host but this one
            return None
        process = os.fork()
        if process:
            self._numbers[process] = order["number"]
            return None
        self.control.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for end, path in ((1, order["out"]), (2, order["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), end)
        os.environ.update(order["environment"])
        if order["cores"]:
            os.sched_setaffinity(0, order["cores"])
        module, _, name = order["function"].partition(":")
        return lambda: getattr(importlib.import_module(module), name)(*order["arguments"])


def host(described: dict[str, Any], control: socket.socket) -> Callable[[], object]:
    """Make this process a host's first; returns in each of its processes that is to call a function, with it."""
    socket.sethostname(described["name"])
    own_files(described["kept"], described["names"], described["scratch"])
    loopback()
    cards = [card(network, described["host"]) for network in range(described["networks"])]
    socket.send_fds(control, [b"cards"], cards)
    for descriptor in cards:
        os.close(descriptor)
    return Agent(control).serve()


def nursery(orders: socket.socket) -> Callable[[], object]:
    """Fork a host for each order, a description with the host's socket; answers with the number of its first process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, 1 << 16, 1)
        if not data:
            os._exit(0)
        if not os.fork():
            described = json.loads(data)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            first = enter(described["clock"])
            if not first:
                orders.close()
                return host(described, socket.socket(fileno=descriptors[0]))
            orders.send(str(first).encode())
            os.close(descriptors[0])
            orders.close()
            os.waitpid(first, 0)
            os._exit(0)
        os.close(descriptors[0])


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # or every fork would copy what is here when it ends
    nursery(socket.socket(fileno=int(sys.argv[1])))()
