"""The processes of a run: found, connected, and asked for the few collectives a step needs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch does not annotate it

# Private, but all there is: groups keep the limit that they were made with, and the first step needs a longer one.
from torch.distributed.distributed_c10d import _set_pg_timeout

from penstock.errors import ConfigError, PeerError, TransportError, WaitTimeoutError
from penstock.parallel.data.attendance import Attendance
from penstock.parallel.data.reducer import GroupReducer, Reducer
from penstock.parallel.mesh import Mesh, MeshShape, make_mesh
from penstock.runtime.health.peers import PeerRegistry
from penstock.runtime.start.launch_environment import find_launch
from penstock.runtime.start.restarts import store_of_this_start
from penstock.runtime.transport.process_group import Bulk
from penstock.runtime.transport.processes import ProcessChannel
from penstock.runtime.workers.collectives import Collectives
from penstock.runtime.workers.timeout import Timeout
from penstock.schedule.program import Program

RESULT_SLOTS = 2
STORE = "PENSTOCK_STORE"
"""Environment variable: a file, new for the run, through which processes of one machine find each other. Nothing listens
beyond the loopback interface then."""


class World:
    """This process among the others.

    Attributes:
        rank, size: as in ``torch.distributed``; once joined, of this process's pipeline alone.
        channel: its end of the edges between ranks, once connected.
        mesh: all processes on their axes, once joined; None for one pipeline.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.channel: ProcessChannel | None = None
        self._peer_registry: PeerRegistry | None = None
        self._together: Collectives | None = None
        self._applied = 0.0
        self.mesh: Mesh | None = None
        self._ranks = list(range(size))
        self._pipelines = [self._ranks]
        self._messages: dist.ProcessGroup | None = None
        self._reductions: dist.ProcessGroup | None = None
        self._buckets: dist.ProcessGroup | None = None
        self._beside: dist.ProcessGroup | None = None
        self._bulk_groups: list[dist.ProcessGroup] = []
        self.timeout = Timeout(60.0)

    @property
    def is_first(self) -> bool:
        """Whether this process is at the start of every axis but that of the pipeline."""
        return self.mesh is None or not any(self.mesh.coordinate(axis) for axis in ("dp", "tp"))

    def join(self, timeout: float, shape: MeshShape | None = None, first: float | None = None) -> World:
        """Open the communicators; every process calls it.

        Args:
            timeout: the longest a wait may last, in seconds.
            shape: where every process is, if there are several pipelines or tensors are cut.
            first: the same until the first step is done, here as well; as `timeout` if None.

        Raises:
            ConfigError: a shape that does not fit the number of processes.
            WaitTimeoutError: not all processes came in time.
        """
        self.timeout = Timeout(timeout, first)
        self._peer_registry = PeerRegistry()
        self._together = Collectives(self.timeout, self._peer_registry)
        if not dist.is_initialized():
            self._meet()
        if shape is not None and (shape.dp > 1 or shape.tp > 1):
            self.mesh = make_mesh(shape.pp, shape.dp, shape.tp, order=shape.order, device=_kind())
            here, everyone = self.rank, range(shape.ranks)
            self._pipelines = _lines(shape.line(rank, "pp") for rank in everyone)
            self._ranks = shape.line(here, "pp")
            self.rank, self.size = self._ranks.index(here), shape.pp
            self._buckets = self._group(_lines(shape.line(rank, "dp") for rank in everyone))
            beside = ([r for q in shape.line(rank, "dp") for r in shape.line(q, "tp")] for rank in everyone)
            self._beside = self._group(_lines(beside))
        self._messages = self._group(self._pipelines, "gloo")
        self._reductions = self._group(self._pipelines)
        return self

    @property
    def _longest(self) -> timedelta:
        """Of the communicators themselves, which keep the limit they are made with."""
        return timedelta(seconds=self.timeout.longest)

    @property
    def peer_registry(self) -> PeerRegistry:
        """What the processes of this machine do."""
        assert self._peer_registry is not None, "joined"
        return self._peer_registry

    @property
    def together(self) -> Collectives:
        """What processes do together outside a step's messages."""
        assert self._together is not None, "joined"
        return self._together

    def _meet(self) -> None:
        """Find the other processes: through the file that `STORE` names, or where the launcher says."""
        both = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        path = os.environ.get(STORE)
        if not path:
            _stay_local()
            url = meeting_url()
            with _opening(f"the {self.size} processes did not all meet{_as_whom()}"):
                names = store_of_this_start(self.rank, self.size, self._longest)
                dist.init_process_group(
                    both,
                    None if names is not None else url,
                    store=names,
                    rank=self.rank,
                    world_size=self.size,
                    timeout=self._longest,
                )
            return
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not os.access(Path(path).parent, os.W_OK):  # the store would try for minutes to open it
            raise ConfigError(
                f"{STORE}={path}: that folder is not there, or cannot be written to; name a file that is new for this "
                "run, the same for all its processes"
            )
        try:
            store = FileStore(path, self.size)
            store.set_timeout(self._longest)
            dist.init_process_group(
                both, store=store, rank=self.rank, world_size=self.size, timeout=self._longest
            )
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            raise WaitTimeoutError(
                f"rank {self.rank} did not meet all {self.size} processes through {STORE}={path} within "
                f"{self.timeout.seconds:g} s: {text}"
            ) from error

    def apply_timeout(self) -> None:
        """Have the communicators keep to the limit as it is now.

        By it gloo ends what it runs in the background, for which a process that ends would wait, and NCCL knows no other.
        """
        if self._applied == self.timeout.seconds:
            return
        self._applied = self.timeout.seconds
        axes = [self.mesh.group(axis) for axis in ("pp", "dp", "tp")] if self.mesh is not None else []
        groups = [self._messages, self._reductions, self._buckets, self._beside, *self._bulk_groups, *axes]
        for group in groups:
            if group is not None:
                _set_pg_timeout(self.timeout.delta, group)
        _set_pg_timeout(self.timeout.delta)

    def _group(self, lines: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
        """The communicator of this process's line, if it is in one; every process makes those of all lines, in one order.

        torch could leave that to the processes of a line. But then it names a communicator by how many there are, and a
        second Pipeline in the same processes finds the addresses that the first one's left in the store.
        """
        found = None
        for line in lines:
            with _opening(f"no connection between the processes {line}"):
                group = dist.new_group(line, timeout=self._longest, backend=backend)
            if dist.get_rank() in line:
                found = group
        return found

    def replicas(self) -> Reducer | None:
        """This process's end of what reduces gradients over its replicas; None if there are none."""
        if self.mesh is None or self.mesh.shape.dp == 1:
            return None
        return GroupReducer(
            self._buckets,
            self.timeout.seconds,
            require_all=self.peer_registry.require_all,
            enter=lambda: self.together.enter(self._buckets),
        )

    def connect(
        self,
        program: Program,
        holders: Sequence[Sequence[int]],
        device: torch.device | None = None,
        backend: str = "nccl",
    ) -> ProcessChannel:
        """Open the Program's edges, after `join`.

        Every rank calls it, with the same Program. Edges that only the end of a step needs (every rank to the one that
        collects the losses, and back) are opened, too.

        Args:
            program: whose edges they are.
            holders: ranks that hold the same parameters and add up their gradients, by what they hold.
            device: where the stages' values are, if not on the CPU; they get a communicator for each directed edge.
            backend: of those communicators.
        """
        assert self._messages is not None, "joined"
        ranks = list(range(self.size))
        collector = program.schedule.placement.holders[-1][0]
        ends = [(collector, r) for r in ranks if r != collector] + [
            (r, collector) for r in ranks if r != collector
        ]
        sizes: dict[tuple[int, int], tuple[int, int]] = dict.fromkeys(ends, (RESULT_SLOTS, RESULT_SLOTS))
        more = [(key, edge.slots, edge.capacity) for key, edge in program.edges.items()]
        for group in holders:
            more += [((a, b), 1, 1) for a in group for b in group if a != b]
        for key, slots, capacity in more:
            before = sizes.get(key, (0, 0))
            sizes[key] = (before[0] + slots, before[1] + capacity)
        bulk = {}
        if device is not None:
            for pair in sorted(sizes):  # every rank makes all of them, in this order
                bulk_group = self._bulk_group(pair, backend)
                if bulk_group is not None:
                    self._bulk_groups.append(bulk_group)
                    peer = pair[0] if self.rank == pair[1] else pair[1]
                    bulk[pair] = Bulk(bulk_group, dist.get_group_rank(bulk_group, peer), device)
                    bulk[pair].greet(self.rank == pair[0], self._longest, peer)
        self.channel = ProcessChannel(
            self._messages,
            self.exchange,
            {s: size for (s, t), size in sizes.items() if t == self.rank},
            {t: size for (s, t), size in sizes.items() if s == self.rank},
            self.timeout,
            bulk,
            self.peer_registry,
        )
        self._see_each_other(self.channel)
        return self.channel

    def _see_each_other(self, channel: ProcessChannel) -> None:
        """Find the pages of all processes on this machine, those of other pipelines included."""
        number, place, name = dist.get_rank(), min(self._ranks), f"rank {self.rank}"
        if self.mesh is not None:
            axes = ", ".join(f"{axis} {self.mesh.coordinate(axis)}" for axis in ("pp", "dp", "tp"))
            name = f"process {number} ({axes})"
        told = self.together.exchange(
            (self.peer_registry.entry(name, self.rank, place), uuid4().hex), None, "meet"
        )
        entries = [entry for entry, _ in told]
        self.peer_registry.meet(entries)
        if any(
            self.together.exchange(not self.peer_registry.sees(entries), None, "meet")
        ):  # all processes ask, or none
            names = [f"{entry.name} on host {entry.host}" for entry in entries]
            whole: Any = dist.group.WORLD
            store = whole.get_group_store().clone()  # a connection of its own
            self.together.attendance = Attendance(store, told[0][1], names)
        found = self.peer_registry.of_pipeline(place)
        channel.others = [
            self.peer_registry.words if r == self.rank else found.get(r) for r in range(self.size)
        ]
        self.together.meet(None, "meet")  # nobody closes its page before all have found it

    def _bulk_group(self, pair: tuple[int, int], backend: str) -> dist.ProcessGroup | None:
        """The communicator of two ranks of this process's pipeline; None if it is neither of them."""
        return self._group([[line[rank] for rank in pair] for line in self._pipelines], backend)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; every rank calls it."""
        return self.together.exchange(value, self._reductions, "tell each other something")

    def gather_dict(self, part: dict[int, Any]) -> dict[int, Any]:
        """Join every rank's dictionary; every rank calls it."""
        return {key: value for one in self.exchange(part) for key, value in one.items()}

    def exchange_beside(self, value: Any) -> list[Any]:
        """The values of all processes with this one's place in their pipeline; they all call it."""
        return self.together.exchange(value, self._beside, "end the step on all replicas")

    def exchange_replicas(self, value: Any, what: str) -> list[Any]:
        """The values of all processes that hold the same parts of the model, by replica; they all call it."""
        return self.together.exchange(value, self._buckets, what)

    def exchange_all(self, value: Any, what: str) -> list[Any]:
        """The values of all processes of the run; they all call it, to do what is said."""
        return self.together.exchange(value, None, what)

    def add_up(self, values: Tensor) -> None:
        """Sum a tensor over all ranks, in place; every rank calls it."""
        self.together.add_up(values, self._reductions, "add up over the pipeline's ranks")

    def add_up_tensor_parallel(self, values: Tensor) -> None:
        """Sum a tensor over the processes that have cut the same matrices, in place; they all call it."""
        if self.mesh is not None and self.mesh.shape.tp > 1:
            self.together.add_up(values, self.mesh.group("tp"), "add up over cut matrices")

    def add_up_replicas(self, values: Tensor) -> None:
        """Sum a tensor over the processes that hold the same parts of the model, in place; they all call it."""
        if self.mesh is not None and self.mesh.shape.dp > 1:
            self.together.add_up(values, self._buckets, "add up over the replicas")

    def disconnect(self, failed: bool = False) -> None:
        """Close what `connect` opened; after a sound run once every rank is here, so that nothing in flight is cut."""
        if self.channel is None:
            return
        if not failed:
            # A rank that is gone, or never comes, does not matter any more.
            with contextlib.suppress(TransportError):
                self.together.meet(self._reductions, "close")
        self.peer_registry.close()
        self.channel.close()
        self.channel = None
        for group in (*self._bulk_groups, self._messages, self._reductions, self._buckets, self._beside):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)


def current_world() -> World | None:
    """The processes this one belongs to; None if it is alone.

    Raises:
        ConfigError: as `find_launch`.
    """
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    launch = find_launch()
    return None if launch is None else World(launch.rank, launch.size)


def meeting_url() -> str:
    """Where the processes of this run meet, as ``init_process_group`` takes it.

    Raises:
        ConfigError: nothing says; the message says what to set.
    """
    launch = find_launch()
    return "env://" if launch is None else launch.url


def _as_whom() -> str:
    """What this process took itself for, where it is not said by RANK and WORLD_SIZE."""
    launch = find_launch()
    if launch is None or launch.from_torch:
        return ""
    return f" (this one is rank {launch.rank} of {launch.launcher}, at {launch.address} port {launch.port})"


def _lines(found: Iterable[Sequence[int]]) -> list[list[int]]:
    """Each once, in an order that is the same everywhere."""
    return sorted({tuple(sorted(line)): list(line) for line in found}.values())


@contextlib.contextmanager
def _opening(what: str) -> Iterator[None]:
    """What ``torch.distributed`` says of processes that are gone or never came, as our own error."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"{what}: {str(error).splitlines()[0]}") from error


def _kind() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _stay_local() -> None:
    """On one machine keep gloo's sockets on the loopback interface, unless the user chose another."""
    launch = find_launch()
    if launch is not None and launch.address in ("127.0.0.1", "localhost", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
