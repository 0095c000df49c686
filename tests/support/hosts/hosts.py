"""Hosts of a test: each has its own network, processes, name, memory files and clock; a network joins them.

A host is a set of namespaces (see `spaces`). So between two hosts messages go over TCP, and within one host through shared
memory. The checkout and the folder of the hosts are shared, as on a cluster with a shared file system.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

from tests.support.hosts.agent import ip

ROOT = Path(__file__).parents[3]
NETWORKS = 2
"""Network cards of a host: eth0 for messages, and eth1."""
IMPORTS = (
    "torch._dynamo",
    "torch.distributed",
    "penstock.runtime.pipeline",
    "penstock.train.loop",
    "tests.support.plain",
)
"""Modules that every process has when it starts; the first backward imports torch._dynamo."""
_CLOCK = 1000  # seconds by which the clock of a host is ahead of that of the host before
_PORT = 20000


@cache
def missing() -> str:
    """Why there can be no hosts here; empty if there can be."""
    if sys.platform != "linux":
        return "hosts are namespaces of Linux"
    command = [sys.executable, "-IS", str(Path(__file__).with_name("spaces.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        "" if done.returncode == 0 else f"no namespaces with network cards here: {done.stderr.strip()[-200:]}"
    )


class Job:
    """A process on a host.

    Attributes:
        code: exit code, negative for a signal; None until it is known.
    """

    def __init__(self, number: int, host: Host, path: Path) -> None:
        self.number, self.host, self.code = number, host, None
        self._path = path

    @property
    def out(self) -> str:
        """What it has written so far."""
        return self._path.with_suffix(".out").read_text()

    @property
    def err(self) -> str:
        return self._path.with_suffix(".err").read_text()

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for its end, and return its exit code."""
        limit = time.monotonic() + timeout
        while self.code is None:
            if not self.host.hear(limit - time.monotonic()):
                raise TimeoutError(f"it still runs:\n{self.out[-2000:]}\n{self.err[-4000:]}")
        return self.code

    def until(self, text: str, timeout: float = 60.0) -> None:
        """Wait until it has written a text."""
        limit = time.monotonic() + timeout
        while text not in self.out:
            self.host.hear(0.02)
            if self.code is not None and text not in self.out:
                raise AssertionError(
                    f"it ended with {self.code} before {text!r}:\n{self.out}\n{self.err[-4000:]}"
                )
            if time.monotonic() > limit:
                raise TimeoutError(f"no {text!r} in\n{self.out}\n{self.err[-4000:]}")


class Host:
    """One host.

    Attributes:
        name: its name, ``host1`` for the first.
        ip: its address in the first network.
        names: its ``/etc/hosts``; write it in place.
    """

    def __init__(self, number: int, folder: Path, apart: bool) -> None:
        self.number, self.name, self.ip = number, f"host{number + 1}", ip(0, number)
        self._folder = folder
        self.names = folder / f"{self.name}.names"
        self.usual_names = "127.0.0.1 localhost\n"
        self._described = {
            "host": number, "name": self.name, "networks": NETWORKS,
            "clock": number * _CLOCK if apart else 0, "kept": [str(ROOT), sys.prefix, str(folder)], "names": str(self.names),
        }  # fmt: skip
        self._jobs: dict[int, Job] = {}
        self._first: int | None = None

    def boot(self, nursery: socket.socket) -> list[int]:
        """Start it, and return the other ends of its network cards."""
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(60)
        self.names.write_text(self.usual_names)
        scratch = tempfile.mkdtemp(dir=self._folder, prefix=f"{self.name}-")
        socket.send_fds(
            nursery, [json.dumps({**self._described, "scratch": scratch}).encode()], [other.fileno()]
        )
        self._first = int(nursery.recv(16))
        other.close()
        said, cards, _, _ = socket.recv_fds(self._control, 16, NETWORKS)
        assert said == b"cards", f"{self.name} did not start"
        return cards

    @property
    def runs(self) -> bool:
        """Whether it is there."""
        return self._first is not None

    def start(self, function: str, *arguments: object, cores: Sequence[int] = (), **environment: str) -> Job:
        """Start a process that calls a function.

        Args:
            function: ``module:function``.
            arguments: arguments of the function, as JSON has them.
            cores: cores that the process may use (default: all).
            environment: variables added to this process's.
        """
        number = len(self._jobs)
        job = self._jobs[number] = Job(number, self, self._folder / f"{self.name}-{time.time_ns()}")
        order: dict[str, Any] = {
            "number": number, "function": function, "arguments": arguments, "cores": list(cores), "environment": environment,
            "out": str(job._path.with_suffix(".out")), "err": str(job._path.with_suffix(".err")),
        }  # fmt: skip
        for end in ("out", "err"):
            job._path.with_suffix(f".{end}").touch()
        self._control.send(json.dumps(order).encode())
        return job

    def signal_all(self, number: int) -> None:
        """Send a signal to all its processes but the first."""
        self._control.send(json.dumps({"signal": number}).encode())

    def hear(self, seconds: float) -> bool:
        """Take one report about a process; return False if there is none in time."""
        self._control.settimeout(max(seconds, 0.001))
        try:
            data = self._control.recv(4096)
        except TimeoutError:
            return False
        if not data:
            raise AssertionError(f"{self.name} is gone")
        number, code = json.loads(data)
        self._jobs[number].code = code
        return True

    def kill(self) -> None:
        """End it with all its processes at once."""
        if self._first is not None:
            os.kill(self._first, 9)
            self._first = None
            self._control.settimeout(10)
            with suppress(ConnectionResetError):
                while self._control.recv(4096):
                    pass  # until the last of its processes has ended
            self._control.close()


class Hosts:
    """Context manager: hosts, numbered from 0, and the network between them.

    Args:
        count: number of hosts.
        apart: whether their clocks differ, as they do on real hosts (default True).
        imports: modules that every process has already when it starts.
    """

    def __init__(self, count: int, apart: bool = True, imports: Sequence[str] = IMPORTS) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-hosts-"))
        self.all = [Host(n, self.folder, apart) for n in range(count)]
        for host in self.all:
            host.usual_names += "".join(f"{other.ip} {other.name}\n" for other in self.all)
        self._imports = tuple(imports)
        self._ports = 0
        self._links: dict[tuple[int, int, int], dict[str, float]] = {}

    def __enter__(self) -> Self:
        here = Path(__file__).parent
        self._cable, self._switch = _child([sys.executable, "-IS", str(here / "cable.py")])
        self._nursery, self._parent = _child(
            [sys.executable, "-m", "tests.support.hosts.agent"], *self._imports
        )
        try:
            self.boot(*range(len(self.all)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.all:
            host.kill()
        for end, process in ((self._cable, self._switch), (self._nursery, self._parent)):
            end.close()
            process.wait()
        shutil.rmtree(self.folder)

    def boot(self, *numbers: int) -> None:
        """Start hosts, at first or after `Host.kill`; their links are as before."""
        for n in numbers:
            for network, descriptor in enumerate(self.all[n].boot(self._nursery)):
                self._tell([network, n], descriptor)
                os.close(descriptor)

    def _tell(self, told: object, *descriptors: int) -> None:
        socket.send_fds(self._cable, [json.dumps(told).encode()], list(descriptors))
        assert self._cable.recv(16) == b"done"

    def link(
        self, between: Sequence[int] | None = None, networks: Sequence[int] = (0,), **values: float
    ) -> None:
        """Set links at once.

        Args:
            between: hosts whose links with each other are set (default: all).
            networks: networks in which they are (default: the first).
            values: ``delay`` and ``jitter`` (seconds, one way), ``loss`` (share of frames), ``rate`` (bytes a second in each
                direction), ``cut``; what is not named is 0.
        """
        members = range(len(self.all)) if between is None else between
        for network in networks:
            for a in members:
                for b in members:
                    if a != b:
                        self._links[network, a, b] = dict(values)
        self._tell([[list(key), settings] for key, settings in self._links.items()])

    def cut(self, host: int) -> None:
        """Pull a host's plugs: what is under way to or from it is lost, and no card notices."""
        for other in range(len(self.all)):
            if other != host:
                self.link((host, other), range(NETWORKS), cut=True)

    def mend(self) -> None:
        """Make all links as they were at first."""
        self._links.clear()
        self._tell([])

    def spread(
        self, function: str, *arguments: object, per_host: int = 2, hosts: Sequence[int] | None = None, **environment: str

    ) -> list[Job]:  # fmt: skip
        """Start one process for each rank, as a launcher does; the ranks of a host are neighbours."""
        numbers = range(len(self.all)) if hosts is None else hosts
        size, port = per_host * len(numbers), self.port()
        return [
            self.all[n].start(
                function, *arguments,
                **{
                    "RANK": str(place * per_host + local), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(per_host), "MASTER_ADDR": self.all[numbers[0]].name, "MASTER_PORT": port,
                    **environment,
                },
            )
            for place, n in enumerate(numbers)
            for local in range(per_host)
        ]  # fmt: skip

    def port(self) -> str:
        """A port that was not used before on any host."""
        self._ports += 1
        return str(_PORT + self._ports)

    def recover(self, hosts: Sequence[int] | None = None) -> None:
        """Mend all links, and end what runs on hosts (default: all); start those that are gone."""
        self.mend()
        for host in self.all if hosts is None else [self.all[n] for n in hosts]:
            host.names.write_text(host.usual_names)
            if host.runs:
                with suppress(OSError):
                    host.signal_all(9)
            else:
                self.boot(host.number)


def _child(command: list[str], *words: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a process with the end of a socket as its first argument; return the other end."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.settimeout(120)
    alone = {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [*command, str(other.fileno()), *words], cwd=ROOT, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL,
        start_new_session=True, env={**os.environ, **alone},
    )  # fmt: skip
    other.close()
    return own, process


def every(jobs: Sequence[Job], timeout: float = 60.0) -> list[int]:
    """Wait for the ends of processes, and return their exit codes."""
    limit = time.monotonic() + timeout
    return [job.wait(limit - time.monotonic()) for job in jobs]
