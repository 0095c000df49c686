"""Communicators of the processes of a run: how they are made, and how they end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

# Imported before there is a default group: default arguments of its functions would keep the one that there is when it is
# imported, and so the threads of gloo, until the interpreter ends.
import torch.distributed.nn  # noqa: F401
from torch import distributed as dist

# Private, since there is no public way to name a group or to make one without the other processes, nor to change a group's
# timeout: groups keep the one they are made with, and the first step needs a longer one.
from torch.distributed.distributed_c10d import _new_process_group_helper, _set_pg_timeout, _world

from penstock.runtime.start.meeting import named_errors
from penstock.runtime.start.restarts import name_of_this_start

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_for_dtensors: WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]] = WeakKeyDictionary()
"""For each start of ``torch.distributed``, the communicators of DTensors by their names."""
_met_here: WeakSet[dist.ProcessGroup] = WeakSet()
"""Default groups that this process opened for its pipelines, and not the user."""
_meshes: WeakSet[DeviceMesh] = WeakSet()
"""The meshes of torch that pipelines of this process have used."""


class Groups:
    """Communicators of some processes, which all of them make in the same order.

    Args:
        members: the processes, as ranks in ``torch.distributed``, ascending.
        longest: timeout of communicators when they are made, in seconds.
    """

    def __init__(self, members: Sequence[int], longest: float) -> None:
        self._members, self._longest = list(members), timedelta(seconds=longest)
        self._made: list[dist.ProcessGroup] = []
        self._named: list[dist.ProcessGroup] = []
        self._applied = 0.0
        self._local: LocalGroups | None = None
        processes = dist.get_world_size()
        if len(members) < processes:
            with named_errors(f"the processes {self._members} of the mesh did not all meet"):
                self._local = LocalGroups(self._members, self._longest)
        # Of all members; None if it is the default group of ``torch.distributed``, where that has one for the CPU.
        self.everyone = (
            self.make([self._members]) if len(members) < processes or _backends() is not None else None
        )

    @property
    def longest(self) -> timedelta:
        """Timeout of the communicators when they are made."""
        return self._longest

    def make(self, lines: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
        """Make a communicator for each line of ranks, and return the one of this process; None if it is in no line.

        Every process makes the communicators of all lines, in one order, unless there are other processes, too.
        """
        joined = None
        if self._local is not None:
            with named_errors(f"no connection between the processes {lines}"):
                joined = self._local.make(lines, backend or _backends(), self._longest)
        else:
            for line in lines:
                with named_errors(f"no connection between the processes {line}"):
                    group = dist.new_group(line, timeout=self._longest, backend=backend or _backends())
                if dist.get_rank() in line:
                    joined = group
        if joined is not None:
            self._made.append(joined)
            self._applied = 0.0  # it has the timeout of a first step
        return joined

    def of_own(self, lines: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
        """Make a communicator for each line of ranks, and return the one of this process, which is in a line."""
        group = self.make(lines, backend)
        assert group is not None, "each process is in a line"
        return group

    def end(self, group: dist.ProcessGroup) -> None:
        """End a communicator."""
        self._made.remove(group)
        dist.destroy_process_group(group)

    def named(self, name: str, ranks: list[int]) -> dist.ProcessGroup:
        """Return the one communicator of some ranks for DTensors, by its name; `release` does not end it."""
        made = _for_dtensors.setdefault(default_group(), {})
        if name not in made:
            with named_errors(f"no connection between the processes {ranks}"):
                made[name] = _new_group(name, ranks, _backends(), self._longest)
        group: dist.ProcessGroup = made[name]
        self._named.append(group)
        return group

    def separate(self, timeout: float) -> dist.ProcessGroup:
        """Return one more communicator of all members, which the caller ends."""
        delta = timedelta(seconds=timeout)
        if self._local is None:
            group: dist.ProcessGroup = dist.new_group(self._members, timeout=delta, backend="gloo")
        else:
            group = self._local.make([self._members], "gloo", delta)
        return group

    def apply_timeout(self, seconds: float, others: Iterable[dist.ProcessGroup]) -> None:
        """Give the communicators and some others the timeout that counts now.

        At that timeout gloo ends its background work, for which a process that exits would wait; NCCL has no other timeout.
        """
        if self._applied == seconds:
            return
        self._applied, delta = seconds, timedelta(seconds=seconds)
        for group in (*self._made, *self._named, *others):
            _set_pg_timeout(delta, group)
        if opened_here():  # one of the user's own keeps its timeout
            _set_pg_timeout(delta)

    def release(self) -> None:
        """End the communicators.

        A communicator of gloo ends, with its threads, when nothing refers to it any more.
        """
        for group in self._made:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._made.clear()
        self.everyone = None


def note_opened_here() -> None:
    """Note that the default group was opened for pipelines, and not by the user."""
    _met_here.add(default_group())


def opened_here() -> bool:
    """Return whether the default group was opened for pipelines, and not by the user."""
    return default_group() in _met_here


def note_mesh(mesh: DeviceMesh) -> None:
    """Note a mesh whose communicators `end_all` drops."""
    _meshes.add(mesh)


def end_all(release: Iterable[Callable[[], None]]) -> None:
    """End all communicators before the interpreter ends.

    A thread of gloo may still hold the last tensor that it has sent. If it drops that while the interpreter ends, it cannot
    take the interpreter's lock, and the process is aborted after everything has succeeded.

    Args:
        release: functions that end the communicators of pipelines.
    """
    for each in release:
        each()
    for groups in _for_dtensors.values():
        groups.clear()
    for mesh in _meshes:
        # Private, since no call drops a mesh's communicators.
        getattr(mesh, "_pg_registry", {}).clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # of communicators that are in a circle of references


def default_group() -> Any:
    """Return the default group of ``torch.distributed``."""
    return dist.group.WORLD


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
        world: Any = default_group()
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
    world: Any = default_group()
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
