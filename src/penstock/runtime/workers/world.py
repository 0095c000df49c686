"""The processes of a run: how they meet and connect, and the few collectives that a step needs."""

from __future__ import annotations

import atexit
import contextlib
import gc
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakSet

import torch

# Imported before there is a default group: default arguments of its functions would keep the one that there is when it is
# imported, and so the threads of gloo, until the interpreter ends.
import torch.distributed.nn  # noqa: F401
from torch import Tensor
from torch import distributed as dist

# Private, since there is no public way to name a group or to make one without the other processes, nor to change a group's
# timeout: groups keep the one they are made with, and the first step needs a longer one.
from torch.distributed.distributed_c10d import _new_process_group_helper, _set_pg_timeout, _world

from penstock.base.counts import plural
from penstock.base.errors import CallOrderError, ConfigError, ScheduleError, TransportError
from penstock.parallel.axes import axes_of
from penstock.parallel.axis import Axis, Over
from penstock.parallel.context.attention import SequencePart
from penstock.parallel.mesh import Mesh, MeshShape, make_mesh
from penstock.parallel.replicas.attendance import Attendance
from penstock.parallel.replicas.reducer import GroupReducer
from penstock.runtime.health.hang import Timeout
from penstock.runtime.health.peers import PeerRegistry
from penstock.runtime.start.launch_environment import find_launch
from penstock.runtime.start.meeting import meet, named_errors
from penstock.runtime.start.restarts import name_of_this_start
from penstock.runtime.transport.process_group import Bulk
from penstock.runtime.transport.processes import ProcessChannel
from penstock.runtime.workers.collectives import Collectives
from penstock.schedule.program import Program

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RESULT_SLOTS = 2
_joins: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""For each start of ``torch.distributed``, the pipelines that this process began to join, by their processes."""
_for_dtensors: WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]] = WeakKeyDictionary()
"""For each start of ``torch.distributed``, the communicators of DTensors by their names."""
_met_here: WeakSet[dist.ProcessGroup] = WeakSet()
"""Default groups that this process opened for its pipelines, and not the user."""
_joined: WeakSet[World] = WeakSet()
"""The worlds of this process that have communicators."""
_meshes: WeakSet[DeviceMesh] = WeakSet()
"""The meshes of torch that pipelines of this process have used."""


class World:
    """This process among the processes of the run.

    Attributes:
        rank, size: rank and world size as in ``torch.distributed``; once joined, within this process's pipeline.
        mesh: the processes of the run on their axes, once joined; None for one pipeline.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.channel: ProcessChannel | None = None
        self._peer_registry: PeerRegistry | None = None
        self._collectives: Collectives | None = None
        self._applied = 0.0
        self._edges: Set[tuple[int, int]] = frozenset()
        self.mesh: Mesh | None = None
        self._members = list(range(size))
        self._local_groups: LocalGroups | None = None
        self._ranks = list(range(size))
        self._pipelines = [self._ranks]
        self._messages: dist.ProcessGroup | None = None
        self._reductions: dist.ProcessGroup | None = None
        self._buckets: dist.ProcessGroup | None = None
        self._beside: dist.ProcessGroup | None = None
        self._named: list[dist.ProcessGroup] = []
        self._releases: list[Callable[[], None]] = []
        self.axes: tuple[Axis, ...] = ()
        self._more_groups: list[dist.ProcessGroup] = []
        # `join` replaces it.
        self.timeout = Timeout(60.0)

    @property
    def is_first(self) -> bool:
        """True if this process has coordinate 0 on every axis except the pipeline's."""
        return self.mesh is None or not any(self.mesh.coordinate(axis) for axis in ("dp", "cp", "tp"))

    @property
    def sample_part(self) -> SequencePart | None:
        """The part of each sample that this process has; None if it has whole samples."""
        if self.mesh is None or self.mesh.shape.cp == 1:
            return None
        return SequencePart(self.mesh.coordinate("cp"), self.mesh.shape.cp)

    @property
    def layers_wait(self) -> bool:
        """True if layers wait for those of other pipelines: they share matrices, experts or samples."""
        return bool(self.axes)

    @property
    def shards_matrices(self) -> bool:
        """True if processes of this mesh share matrices (tensor parallelism) or experts."""
        return any(axis.divides_parameters for axis in self.axes)

    def join(
        self,
        timeout: float,
        mesh: MeshShape | Mesh | None = None,
        first: float | None = None,
        compare: Callable[[Collectives], None] = lambda collectives: None,
        device: str = "cpu",
    ) -> World:
        """Open the communicators; every process of the mesh calls it.

        Args:
            mesh: ranks on each axis, if there are several pipelines or tensors are sharded (default None); or a mesh that
                was made already, which may have some of the processes only.
            compare: function that is called once all processes have met, before what depends on their arguments.
            device: type of the devices that have the weights (default "cpu").
        """
        self.timeout, self.device_type = Timeout(timeout, first), device
        self._peer_registry = PeerRegistry()
        self._collectives = Collectives(self.timeout, self._peer_registry)
        if not _joined:
            atexit.unregister(_leave)
            atexit.register(_leave)  # after what the user has registered so far, and so called before it
        _joined.add(self)
        if not dist.is_initialized():
            meet(self.rank, self.size, self.timeout)
            _met_here.add(_default_group())
        if isinstance(mesh, Mesh):
            self._members = sorted(mesh.ranks)
        self._join_members()
        self.collectives.attendance = self._attendance_of_join()
        compare(self.collectives)
        # One that the user opened keeps its own timeout. After all have met, since this wait does not say who is missing.
        if self.collectives.everyone is None and _default_group() not in _met_here:
            self.collectives.everyone = self._group([self._members])
        if isinstance(mesh, MeshShape):
            is_one = mesh.replicas == mesh.tp == 1
            mesh = (
                None
                if is_one
                else make_mesh(
                    mesh.pp,
                    mesh.dp,
                    mesh.tp,
                    order=mesh.order,
                    ep=mesh.ep,
                    cp=mesh.cp,
                    device=device,
                )
            )
        if mesh is not None:
            _meshes.add(mesh.device_mesh)
            shape, everyone = mesh.shape, range(mesh.shape.ranks)
            self._pipelines = _distinct(mesh.line(rank, "pp") for rank in everyone)
            self._ranks = mesh.line(mesh.rank, "pp")
            self.rank, self.size = mesh.coordinate("pp"), shape.pp
            if shape.replicas > 1 or shape.tp > 1:
                self.mesh = mesh
                self._buckets = self._group(self.lines(shape.replica_ranks))
                self._beside = self._group(self.lines(shape.stage_ranks))
        self._messages = self._group(self._pipelines, "gloo")
        self._reductions = self._group(self._pipelines)
        self.axes = () if self.mesh is None else axes_of(self, self.mesh)
        return self

    def lines(self, line_of: Callable[[int], list[int]]) -> list[list[int]]:
        """Return the lines of the mesh that a function gives by rank, as ranks in ``torch.distributed``."""
        mesh = self.mesh
        assert mesh is not None, "joined with a mesh"
        return _distinct(sorted(mesh.ranks[r] for r in line_of(rank)) for rank in range(mesh.shape.ranks))

    def _join_members(self) -> None:
        """Open the communicator of all processes of the run, unless ``torch.distributed`` has one for the CPU."""
        members, processes = self._members, dist.get_world_size()
        if len(members) < processes:
            with named_errors(f"the processes {members} of the mesh did not all meet"):
                self._local_groups = LocalGroups(members, self._longest)
        if len(members) < processes or _backends() is not None:
            self.collectives.everyone = self._group([members])

    def _attendance_of_join(self) -> Attendance:
        """Return an attendance by which a wait names the processes that build no such pipeline, before any page is open."""
        world: Any = _default_group()
        members = tuple(self._members)
        counts = _joins.setdefault(world, Counter())
        counts[members] += 1
        prefix = f"penstock/join/{'-'.join(map(str, members))}/{counts[members]}"
        names = {rank: f"rank {rank}" for rank in members}
        return Attendance(world.get_group_store().clone(), prefix, names)

    @property
    def _longest(self) -> timedelta:
        """The timeout of the communicators when they are made."""
        return timedelta(seconds=self.timeout.longest)

    @property
    def peer_registry(self) -> PeerRegistry:
        """The registry of the processes of this machine, once joined."""
        assert self._peer_registry is not None, "joined"
        return self._peer_registry

    @property
    def collectives(self) -> Collectives:
        """The collectives of the run's processes, once joined."""
        assert self._collectives is not None, "joined"
        return self._collectives

    def apply_timeout(self) -> None:
        """Give the communicators the timeout that counts now.

        At that timeout gloo ends its background work, for which a process that exits would wait; NCCL has no other timeout.
        """
        if self._applied == self.timeout.seconds:
            return
        self._applied = self.timeout.seconds
        axes = self.mesh.groups() if self.mesh is not None else []
        everyone = self.collectives.everyone
        for group in (everyone, *self._own_groups(), *self._named, *axes):
            if group is not None:
                _set_pg_timeout(self.timeout.delta, group)
        if _default_group() in _met_here:  # one of the user's own keeps its timeout
            _set_pg_timeout(self.timeout.delta)

    def _own_groups(self) -> list[dist.ProcessGroup | None]:
        return [*self._more_groups, self._messages, self._reductions, self._buckets, self._beside]

    def open_group(self, lines: list[list[int]]) -> dist.ProcessGroup:
        """Make one more communicator for each line of ranks, and return the one of this process, which is in a line."""
        group = self._group(lines)
        assert group is not None, "each process is in a line"
        self._more_groups.append(group)
        self._applied = 0.0  # it has the timeout of a first step
        return group

    def end_group(self, group: dist.ProcessGroup) -> None:
        """End a communicator of `open_group`."""
        self._more_groups.remove(group)
        dist.destroy_process_group(group)

    def open_store(self) -> Any:
        """Return a connection of its own to the rendezvous store."""
        world: Any = _default_group()
        return world.get_group_store().clone()

    def on_release(self, release: Callable[[], None]) -> None:
        """Have a function called when all communicators end; it drops what refers to them."""
        self._releases.append(release)

    def _group(self, lines: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
        """Make a communicator for each line of ranks, and return the one of this process; None if it is in no line.

        Every process makes the communicators of all lines, in one order, unless the mesh has some of the processes only.
        """
        if self._local_groups is not None:
            with named_errors(f"no connection between the processes {lines}"):
                group: dist.ProcessGroup | None = self._local_groups.make(
                    lines, backend or _backends(), self._longest
                )
            return group
        joined, backend = None, backend or _backends()
        for line in lines:
            with named_errors(f"no connection between the processes {line}"):
                group = dist.new_group(line, timeout=self._longest, backend=backend)
            if dist.get_rank() in line:
                joined = group
        return joined

    def named_group(self, name: str, ranks: list[int]) -> dist.ProcessGroup:
        """Return the one communicator of some ranks for DTensors, by its name; it is not destroyed with this world."""
        made = _for_dtensors.setdefault(_default_group(), {})
        if name not in made:
            with named_errors(f"no connection between the processes {ranks}"):
                made[name] = _new_group(name, ranks, _backends(), self._longest)
        group: dist.ProcessGroup = made[name]
        self._named.append(group)
        return group

    def replicas(self, divided: bool) -> GroupReducer | None:
        """Return this process's end of the reduction of gradients over its replicas; None if there are none.

        Args:
            divided: whether gradients of parameters that an axis divides are summed over other processes.
        """
        if self.mesh is None or (self.mesh.shape.replicas == 1 and not divided):
            return None
        assert self._buckets is not None, "joined"
        return self.open_reducer(self._buckets)

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
        """Open the Program's edges, after `join`; every rank calls it with the same Program.

        Args:
            device: device of the stages' values, with a communicator for each directed edge; None on the CPU (default).
        """
        assert self._messages is not None, "joined"
        if device is not None:
            self._require_own_gpu(device, backend)
        sizes = self._edge_sizes(program, holders)
        self._edges = sizes.keys()
        self.channel = ProcessChannel(
            self._messages,
            self.gather,
            incoming={s: size for (s, t), size in sizes.items() if t == self.rank},
            outgoing={t: size for (s, t), size in sizes.items() if s == self.rank},
            timeout=self.timeout,
            bulk=self._open_bulk(sizes, device, backend) if device is not None else {},
            peer_registry=self.peer_registry,
        )
        self._register_peers(self.channel)
        return self.channel

    def _require_own_gpu(self, device: torch.device, backend: str) -> None:
        """Raise ConfigError on every process if two of a pipeline compute on one GPU, which NCCL does not connect."""
        if backend != "nccl":
            return
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        owners: dict[tuple[int, str, str], list[int]] = {}
        for key, rank in self.collectives.gather(
            ((min(self._ranks), socket.gethostname(), gpu), self.rank), None, "compare GPUs"
        ):
            owners.setdefault(key, []).append(rank)
        for (_, name, _), ranks in owners.items():
            if len(ranks) > 1:
                raise ConfigError(
                    f"ranks {', '.join(map(str, ranks))} of a pipeline compute on one GPU of host {name}, and NCCL connects "
                    "processes that have a GPU each; start as many processes on a host as it has GPUs, with LOCAL_RANK set "
                    "as torchrun does, or run the ranks as threads of one process, which may share a GPU"
                )

    def widen(self, program: Program, holders: Sequence[Sequence[int]]) -> None:
        """Make room on this rank's edges for the messages of another Program of the same placement."""
        assert self.channel is not None, "connected"
        sizes = self._edge_sizes(program, holders)
        if more := sorted(sizes.keys() - self._edges):
            (source, target), schedule = more[0], program.schedule
            raise ScheduleError(
                f"with {plural(schedule.microbatches, 'microbatch')} rank {source} of the schedule {schedule.name} sends to "
                f"rank {target}, unlike with the number that the pipeline was built for; build another one"
            )
        self.channel.widen(
            {target: size for (source, target), (_, size) in sizes.items() if source == self.rank}
        )

    def _edge_sizes(
        self, program: Program, holders: Sequence[Sequence[int]]
    ) -> dict[tuple[int, int], tuple[int, int]]:
        """Return (slots, capacity) of every edge, with those that collect the losses or sum gradients at a step's end."""
        collector = program.schedule.placement.holders[-1][0]
        others = [r for r in range(self.size) if r != collector]
        result_edges = [(collector, r) for r in others] + [(r, collector) for r in others]
        sizes: dict[tuple[int, int], tuple[int, int]] = dict.fromkeys(
            result_edges, (RESULT_SLOTS, RESULT_SLOTS)
        )
        more = [(key, edge.slots, edge.capacity) for key, edge in program.edges.items()]
        for group in holders:
            more += [((a, b), 1, 1) for a in group for b in group if a != b]
        for key, slots, capacity in more:
            before = sizes.get(key, (0, 0))
            sizes[key] = (before[0] + slots, before[1] + capacity)
        return sizes

    def _open_bulk(
        self, edges: Iterable[tuple[int, int]], device: torch.device, backend: str
    ) -> Mapping[tuple[int, int], Bulk]:
        """Open the communicators for values on a device, one for each directed edge of this process."""
        bulk = {}
        for edge in sorted(edges):  # every rank makes all of them, in this order
            group = self._group([[line[rank] for rank in edge] for line in self._pipelines], backend)
            if group is not None:
                self._more_groups.append(group)
                peer = edge[0] if self.rank == edge[1] else edge[1]
                bulk[edge] = Bulk(group, dist.get_group_rank(group, peer), device)
                bulk[edge].greet(self.rank == edge[0], self._longest, peer)
        return bulk

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
            world: Any = _default_group()
            store = world.get_group_store().clone()  # a separate connection
            collectives.attendance = Attendance(store, replies[0][1], names)
        hosts = {entry.rank: entry.host for entry in entries if entry.pipeline == pipeline}
        channel.hosts = [hosts[r] for r in range(self.size)]
        others = registry.progress_of(pipeline)
        channel.all_progress = [
            registry.progress if r == self.rank else others.get(r) for r in range(self.size)
        ]
        collectives.barrier(None, "meet")  # a page must not close before all processes have opened it

    def gather(self, value: Any, over: Over = "pp", action: str = "exchange values") -> list[Any]:
        """Return the values of some processes, by rank; all of them call it.

        Args:
            over: the ranks of this pipeline; the replicas with the same shards of the model ("dp"); the processes with this
                one's rank in their pipelines ("dp and tp"); or all processes of the run.
            action: what they do, for errors, as in "waited for the other processes, to exchange values".
        """
        groups = {"pp": self._reductions, "dp": self._buckets, "dp and tp": self._beside, "run": None}
        return self.collectives.gather(value, groups[over], action)

    def separate_group(self, timeout: float) -> dist.ProcessGroup:
        """Return one more group of all processes of the run, which the caller destroys; every process calls it."""
        delta = timedelta(seconds=timeout)
        if self._local_groups is None:
            group: dist.ProcessGroup = dist.new_group(self._members, timeout=delta, backend="gloo")
        else:
            group = self._local_groups.make([self._members], "gloo", delta)
        return group

    def gather_dict(self, part: dict[int, Any]) -> dict[int, Any]:
        """Join the dictionaries of all ranks; every rank calls it."""
        return {key: value for other in self.gather(part) for key, value in other.items()}

    def all_reduce(self, values: Tensor) -> None:
        """Sum a tensor over all ranks, in place; every rank calls it."""
        self.collectives.all_reduce(values, self._reductions, "add up over the pipeline's ranks")

    def broadcast(self, values: Tensor, source: int) -> None:
        """Fill a tensor with that of a rank of this pipeline; every rank calls it."""
        self.collectives.broadcast(values, source, self._reductions, "send a tensor to all ranks")

    def all_reduce_tp(self, values: Tensor) -> None:
        """Sum a tensor over the processes that shard the same matrices, in place; they all call it."""
        if self.mesh is not None and self.mesh.shape.tp > 1:
            self.collectives.all_reduce(values, self.mesh.group("tp"), "add up over sharded matrices")

    def all_reduce_dp(self, values: Tensor) -> None:
        """Sum a tensor over the processes with the same shards of the model, in place; they all call it."""
        if self.mesh is not None and self.mesh.shape.replicas > 1:
            self.collectives.all_reduce(values, self._buckets, "add up over the replicas")

    def sum_over_stage(self, values: Tensor, action: str) -> None:
        """Sum a tensor over the processes with this one's rank in their pipelines, in place; they all call it."""
        self.collectives.all_reduce(values, self._beside, action)

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
                self.collectives.barrier(self._reductions, "close")
        # First, so that a process that sees the connections end does not take this one for failed.
        self.peer_registry.close()
        self.channel.close()
        self.channel = None
        self.release()

    def release(self) -> None:
        """End the communicators of this world alone.

        A communicator of gloo ends, with its threads, when nothing refers to it any more.
        """
        _joined.discard(self)
        for group in (*self._own_groups(), self.collectives.everyone):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._messages = self._reductions = self._buckets = self._beside = None
        self.collectives.everyone = None
        self._more_groups.clear()
        for release in self._releases:
            release()
        self._releases.clear()


def _leave() -> None:
    """End all communicators before the interpreter ends.

    A thread of gloo may still hold the last tensor that it has sent. If it drops that while the interpreter ends, it cannot
    take the interpreter's lock, and the process is aborted after everything has succeeded.
    """
    for world in list(_joined):
        world.release()
    for groups in _for_dtensors.values():
        groups.clear()
    for mesh in _meshes:
        # Private, since no call drops a mesh's communicators.
        getattr(mesh, "_pg_registry", {}).clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # of communicators that are in a circle of references


def current_world() -> World | None:
    """Return the processes of this run; None if there is only this one."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    launch = find_launch()
    return None if launch is None else World(launch.rank, launch.size)


def _default_group() -> dist.ProcessGroup:
    group: Any = dist.group.WORLD
    opened: dist.ProcessGroup = group
    return opened


def _distinct(lines: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return each line once, in an order that is the same on every process."""
    return sorted({tuple(sorted(line)): list(line) for line in lines}.values())


def _backends() -> str | None:
    """Return the backends of a communicator for CPU and GPU; None if those of ``torch.distributed`` are such.

    A group that was initialised for GPUs alone ("nccl") cannot exchange values in host memory.
    """
    config = dist.get_backend_config(None)
    return None if "cpu:" in config else f"cpu:gloo,{config}"


class LocalGroups:
    """Groups within some processes of the run, for a mesh that has only these; all of them make one with the same arguments.

    ``torch.distributed.new_group`` is called by all processes of the run, or else names a group by the number of groups that
    this process has: after one was destroyed, the next would read its addresses from the store. Here the processes of a
    mesh agree on a name that was never used.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        world: Any = _default_group()
        # PrefixStore is public, though torch does not export it explicitly.
        store = dist.PrefixStore(f"penstock/{'-'.join(map(str, ranks))}", world.get_group_store())  # type: ignore[attr-defined]
        position = list(ranks).index(dist.get_rank())
        self._name = name_of_this_start(store, position, len(ranks), timeout)
        self._made = 0

    def make(self, lines: Sequence[Sequence[int]], backend: str | None, timeout: timedelta) -> Any:
        """Make the group of the line that has this process; every process calls it, each in the same order.

        Args:
            lines: lines of ranks in ``torch.distributed``, ascending; no two have a common one.
        """
        self._made += 1
        rank = dist.get_rank()
        line = next((line for line in lines if rank in line), None)
        if line is None:
            return None
        return _new_group(f"{self._name}/{self._made}/{line[0]}", line, backend, timeout)


def _new_group(name: str, ranks: Sequence[int], backend: str | None, timeout: timedelta) -> Any:
    """Make a communicator of ranks in ``torch.distributed``, ascending; only they call it, each with the same name."""
    world: Any = _default_group()
    group, _ = _new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend or _world.pg_map[world][0]),
        world.get_group_store(),
        name,  # type: ignore[arg-type]  # a new type of str in torch, and private
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {other: n for n, other in enumerate(ranks)}
    return group
