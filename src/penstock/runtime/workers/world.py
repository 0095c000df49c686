"""The processes of a run: how they meet and connect, and the few collectives that a step needs."""

from __future__ import annotations

import atexit
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.base.counts import plural
from penstock.base.errors import CallOrderError, ScheduleError, TransportError
from penstock.parallel.axes import axes_of
from penstock.parallel.axis import Axis, Over
from penstock.parallel.mesh import REPLICATED, SHARED, Mesh, MeshShape, open_mesh
from penstock.parallel.replicas.attendance import Attendance
from penstock.parallel.replicas.reducer import GroupReducer
from penstock.parallel.sample_parts import SampleParts
from penstock.runtime.health.hang import Timeout
from penstock.runtime.health.peers import PeerRegistry
from penstock.runtime.start.meeting import meet
from penstock.runtime.transport.processes import ProcessChannel
from penstock.runtime.workers.collectives import Collectives
from penstock.runtime.workers.edges import edge_sizes, open_bulk, require_own_gpu
from penstock.runtime.workers.groups import (
    Groups,
    default_group,
    end_all,
    note_mesh,
    note_opened_here,
    opened_here,
)
from penstock.schedule.program import Program

_joins: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""For each start of ``torch.distributed``, the pipelines that this process began to join, by their processes."""
_joined: WeakSet[World] = WeakSet()
"""The worlds of this process that have communicators."""


class World:
    """This process among the processes of the run, which have met; every process of the mesh makes one.

    Args:
        rank, size: rank and world size as in ``torch.distributed``.
        timeout: longest wait, in seconds.
        mesh: ranks on each axis, if there are several pipelines or tensors are sharded (default None); or a mesh that was
            made already, which may have some of the processes only.
        first: longest wait of the first step, in seconds.
        compare: function that is called once all processes have met, before what depends on their arguments.
        device: type of the devices that have the weights (default "cpu").

    Attributes:
        rank, size: within this process's pipeline.
        mesh: the processes of the run on their axes; None for one pipeline.
        channel: connections to the other ranks of the pipeline, from `connect` to `disconnect`.
        axes: axes of the mesh beside the pipeline's.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        mesh: MeshShape | Mesh | None = None,
        *,
        first: float | None = None,
        compare: Callable[[Collectives], None] = lambda collectives: None,
        device: str = "cpu",
    ) -> None:
        self.timeout, self.device_type = Timeout(timeout, first), device
        self.peer_registry = PeerRegistry()
        self.collectives = Collectives(self.timeout, self.peer_registry)
        self.channel: ProcessChannel | None = None
        self._releases: list[Callable[[], None]] = []
        if not _joined:
            atexit.unregister(_leave)
            atexit.register(_leave)  # after what the user has registered so far, and so called before it
        # 1. All processes meet, and compare what each was given.
        if not dist.is_initialized():
            meet(rank, size, self.timeout)
            note_opened_here()
        self._members = sorted(mesh.ranks) if isinstance(mesh, Mesh) else list(range(size))
        self._groups = Groups(self._members, self.timeout.longest)
        _joined.add(self)
        self.collectives.everyone = self._groups.everyone
        self.collectives.attendance = self._attendance_of_join()
        compare(self.collectives)
        # One that the user opened keeps its own timeout. After all have met, since this wait does not say who is missing.
        if self.collectives.everyone is None and not opened_here():
            self.collectives.everyone = self._groups.make([self._members])
        # 2. Their places on the axes of the mesh.
        if isinstance(mesh, MeshShape):
            mesh = open_mesh(mesh, device) if mesh.ranks > mesh.pp else None
        self.rank, self.size, self._ranks = rank, size, list(range(size))
        self._pipelines = [self._ranks]
        self.mesh: Mesh | None = None
        if mesh is not None:
            note_mesh(mesh.device_mesh)
            self._pipelines = _distinct(mesh.line(each, "pp") for each in range(mesh.shape.ranks))
            self._ranks = mesh.line(mesh.rank, "pp")
            self.rank, self.size = mesh.coordinate("pp"), mesh.shape.pp
            self.mesh = mesh if mesh.shape.ranks > mesh.shape.pp else None
        # 3. The communicators, in one order on every process.
        self._over: dict[str, dist.ProcessGroup] = {}
        if self.mesh is not None:
            self._over["replicas"] = self._groups.of_own(self.lines(self.mesh.shape.replica_ranks))
            self._over["stage"] = self._groups.of_own(self.lines(self.mesh.shape.stage_ranks))
        self._over["messages"] = self._groups.of_own(self._pipelines, "gloo")
        self._over["pipeline"] = self._groups.of_own(self._pipelines)
        self.axes: tuple[Axis, ...] = () if self.mesh is None else axes_of(self, self.mesh)

    @property
    def is_first(self) -> bool:
        """True if this process has coordinate 0 on every axis except the pipeline's."""
        return self.mesh is None or not any(self.mesh.coordinate(axis) for axis in (*REPLICATED, *SHARED))

    @property
    def replica_count(self) -> int:
        """Number of processes with this one's parameters."""
        return 1 if self.mesh is None else self.mesh.shape.replicas

    @property
    def sample_parts(self) -> SampleParts:
        """The parts of samples that processes with the same parameters have."""
        if self.mesh is None:
            return SampleParts()
        divisions = {axis.name: axis.division for axis in self.axes}
        in_order = (divisions.get(name) for name in REPLICATED)
        return SampleParts(
            tuple(division for division in in_order if division is not None), self.mesh.replica
        )

    @property
    def layers_wait(self) -> bool:
        """True if layers wait for those of other pipelines: they share matrices, experts or samples."""
        return bool(self.axes)

    @property
    def shards_matrices(self) -> bool:
        """True if processes of this mesh share matrices (tensor parallelism) or experts."""
        return any(axis.divides_parameters for axis in self.axes)

    def lines(self, line_of: Callable[[int], list[int]]) -> list[list[int]]:
        """Return the lines of the mesh that a function gives by rank, as ranks in ``torch.distributed``."""
        mesh = self.mesh
        assert mesh is not None, "joined with a mesh"
        return _distinct(sorted(mesh.ranks[r] for r in line_of(rank)) for rank in range(mesh.shape.ranks))

    def _attendance_of_join(self) -> Attendance:
        """Return an attendance by which a wait names the processes that build no such pipeline, before any page is open."""
        members = tuple(self._members)
        counts = _joins.setdefault(default_group(), Counter())
        counts[members] += 1
        prefix = f"penstock/join/{'-'.join(map(str, members))}/{counts[members]}"
        names = {rank: f"rank {rank}" for rank in members}
        return Attendance(self.open_store(), prefix, names)

    def apply_timeout(self) -> None:
        """Give the communicators the timeout that counts now; see `Groups.apply_timeout`."""
        self._groups.apply_timeout(self.timeout.seconds, [] if self.mesh is None else self.mesh.groups())

    def open_group(self, lines: list[list[int]]) -> dist.ProcessGroup:
        """Make one more communicator for each line of ranks, and return the one of this process, which is in a line."""
        return self._groups.of_own(lines)

    def end_group(self, group: dist.ProcessGroup) -> None:
        """End a communicator of `open_group`."""
        self._groups.end(group)

    def named_group(self, name: str, ranks: list[int]) -> dist.ProcessGroup:
        """Return the one communicator of some ranks for DTensors, by its name; it is not destroyed with this world."""
        return self._groups.named(name, ranks)

    def separate_group(self, timeout: float) -> dist.ProcessGroup:
        """Return one more group of all processes of the run, which the caller destroys; every process calls it."""
        return self._groups.separate(timeout)

    def open_store(self) -> Any:
        """Return a connection of its own to the rendezvous store."""
        return default_group().get_group_store().clone()

    def on_release(self, release: Callable[[], None]) -> None:
        """Have a function called when all communicators end; it drops what refers to them."""
        self._releases.append(release)

    def replicas(self, divided: bool) -> GroupReducer | None:
        """Return this process's end of the reduction of gradients over its replicas; None if there are none.

        Args:
            divided: whether gradients of parameters that an axis divides are summed over other processes.
        """
        if self.mesh is None or (self.replica_count == 1 and not divided):
            return None
        return self.open_reducer(self._over["replicas"])

    def open_reducer(self, group: dist.ProcessGroup) -> GroupReducer:
        """Return this process's end of sums of gradients over a group."""
        reducer = GroupReducer(
            group,
            self.timeout.seconds,
            require_all=self.peer_registry.require_all,
            enter=partial(self.collectives.enter, group),
        )
        self.on_release(reducer.release)
        return reducer

    def connect(
        self,
        program: Program,
        holders: Sequence[Sequence[int]],
        device: torch.device | None = None,
        backend: str = "nccl",
    ) -> ProcessChannel:
        """Open the Program's edges; every rank calls it with the same Program.

        Args:
            device: device of the stages' values, with a communicator for each directed edge; None on the CPU (default).
        """
        if device is not None and backend == "nccl":
            require_own_gpu(device, self.collectives, min(self._ranks), self.rank)
        sizes = edge_sizes(program, holders, self.size)
        self._edges = sizes.keys()
        bulk = {}
        if device is not None:
            bulk = open_bulk(self._groups, sizes, self.rank, self._pipelines, device, backend)
        self.channel = ProcessChannel(
            self._over["messages"],
            self.gather,
            incoming={s: size for (s, t), size in sizes.items() if t == self.rank},
            outgoing={t: size for (s, t), size in sizes.items() if s == self.rank},
            timeout=self.timeout,
            bulk=bulk,
            peer_registry=self.peer_registry,
        )
        self._register_peers(self.channel)
        return self.channel

    def widen(self, program: Program, holders: Sequence[Sequence[int]]) -> None:
        """Make room on this rank's edges for the messages of another Program of the same placement."""
        assert self.channel is not None, "connected"
        sizes = edge_sizes(program, holders, self.size)
        if more := sorted(sizes.keys() - self._edges):
            (source, target), schedule = more[0], program.schedule
            raise ScheduleError(
                f"with {plural(schedule.microbatches, 'microbatch')} rank {source} of the schedule {schedule.name} sends to "
                f"rank {target}, unlike with the number that the pipeline was built for; build another one"
            )
        self.channel.widen(
            {target: size for (source, target), (_, size) in sizes.items() if source == self.rank}
        )

    def _register_peers(self, channel: ProcessChannel) -> None:
        """Open the pages of all processes on this machine, in other pipelines, too."""
        number, pipeline, name = dist.get_rank(), min(self._ranks), f"rank {self.rank}"
        if self.mesh is not None:
            axes = ", ".join(f"{axis} {self.mesh.coordinate(axis)}" for axis in self.mesh.shape.axes)
            name = f"process {number} ({axes})"
        registry, collectives = self.peer_registry, self.collectives
        entry = registry.entry(name, self.rank, pipeline)
        replies = collectives.gather((entry, uuid4().hex), None, "meet")
        entries = [entry for entry, _ in replies]
        registry.open_pages(entries)
        unseen = any(collectives.gather(not registry.sees_all(entries), None, "meet"))
        collectives.attendance = None
        if unseen:
            # One process that cannot see all pages is enough: either all of them use the attendance, or none.
            names = {
                rank: f"{entry.name} on host {entry.host}"
                for rank, entry in zip(self._members, entries, strict=True)
            }
            collectives.attendance = Attendance(self.open_store(), replies[0][1], names)
        hosts = {entry.rank: entry.host for entry in entries if entry.pipeline == pipeline}
        channel.hosts = [hosts[r] for r in range(self.size)]
        others = registry.progress_of(pipeline)
        channel.all_progress = [
            registry.progress if r == self.rank else others.get(r) for r in range(self.size)
        ]
        collectives.barrier(None, "meet")  # a page must not close before all processes have opened it

    def gather(self, value: Any, over: Over = "pipeline", action: str = "exchange values") -> list[Any]:
        """Return the values of some processes, by rank; all of them call it.

        Args:
            over: the ranks of this pipeline; the replicas with the same shards of the model; the processes with this one's
                rank in their pipelines ("stage"); or all processes of the run.
            action: what they do, for errors, as in "waited for the other processes, to exchange values".
        """
        return self.collectives.gather(value, None if over == "run" else self._over[over], action)

    def gather_dict(self, part: dict[int, Any]) -> dict[int, Any]:
        """Join the dictionaries of all ranks; every rank calls it."""
        return {key: value for other in self.gather(part) for key, value in other.items()}

    def all_reduce(self, values: Tensor) -> None:
        """Sum a tensor over all ranks, in place; every rank calls it."""
        self.collectives.all_reduce(values, self._over["pipeline"], "add up over the pipeline's ranks")

    def all_reduce_replica(self, values: Tensor) -> None:
        """Sum a tensor over the processes of this replica, in place: the ranks, and those that share their matrices."""
        for axis in SHARED:
            if self.mesh is not None and self.mesh.shape.size(axis) > 1:
                self.collectives.all_reduce(values, self.mesh.group(axis), "add up over sharded matrices")
        self.all_reduce(values)

    def all_reduce_dp(self, values: Tensor) -> None:
        """Sum a tensor over the processes with the same shards of the model, in place; they all call it."""
        if self.replica_count > 1:
            self.collectives.all_reduce(values, self._over["replicas"], "add up over the replicas")

    def sum_over_stage(self, values: Tensor, action: str) -> None:
        """Sum a tensor over the processes with this one's rank in their pipelines, in place; they all call it."""
        self.collectives.all_reduce(values, self._over["stage"], action)

    def broadcast(self, values: Tensor, source: int) -> None:
        """Fill a tensor with that of a rank of this pipeline; every rank calls it."""
        self.collectives.broadcast(values, source, self._over["pipeline"], "send a tensor to all ranks")

    def disconnect(self, failed: bool = False) -> None:
        """Close everything that `connect` opened.

        Args:
            failed: whether a step failed; otherwise wait for every rank, so that no message is lost (default False).
        """
        if self.channel is None:
            return
        if not failed:
            # A rank that has ended, never comes or makes another call no longer matters: it is told, too.
            with contextlib.suppress(TransportError, CallOrderError):
                self.collectives.barrier(self._over["pipeline"], "close")
        # First, so that a process that sees the connections end does not take this one for failed.
        self.peer_registry.close()
        self.channel.close()
        self.channel = None
        self.release()

    def release(self) -> None:
        """End the communicators of this world alone, and drop what refers to them."""
        _joined.discard(self)
        self._over.clear()
        self._groups.release()
        self.collectives.everyone = None
        for release in self._releases:
            release()
        self._releases.clear()


def _leave() -> None:
    """End all communicators before the interpreter ends."""
    end_all([world.release for world in _joined])


def _distinct(lines: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return each line once, in an order that is the same on every process."""
    return sorted({tuple(sorted(line)): list(line) for line in lines}.values())
