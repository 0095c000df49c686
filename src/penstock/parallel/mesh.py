"""Ranks on the axes of a mesh: pipeline (pp), data (dp), context (cp) and tensor parallelism (tp)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from penstock.base.counts import few, is_count, plural
from penstock.base.errors import ConfigError, nearest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_DIVIDES_SAMPLES = {"divides_samples": True}
"""Metadata of the size of an axis whose ranks divide each sample, and have the same parameters."""


@dataclass(frozen=True)
class MeshShape:
    """Sizes and order of the mesh's axes.

    Attributes:
        pp, dp, tp: number of ranks on each axis (default 1).
        order: axes, outermost first; neighbouring ranks differ in the last one (default pp, dp, cp, tp; without cp it
            follows dp).
        ep: number of ranks that divide the experts of a layer (default 1). No axis of its own: it divides the dp x cp x tp
            ranks of a stage, so that ep neighbours have all experts, and dp x cp x tp / ep ranks have the same ones.
        cp: number of ranks that divide the tokens of each sample (default 1); see `penstock.parallel.context.attention`.

    Raises:
        ConfigError: if a size is not positive, the order does not name these axes once each, or ep does not divide the
            ranks of a stage.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    order: tuple[str, ...] = field(default_factory=lambda: AXIS_NAMES)
    ep: int = 1
    cp: int = field(default=1, metadata=_DIVIDES_SAMPLES)

    def __post_init__(self) -> None:
        for outer, axis in pairwise(REPLICATED):
            if axis not in self.order and outer in self.order:
                after = self.order.index(outer) + 1
                object.__setattr__(self, "order", (*self.order[:after], axis, *self.order[after:]))
        for axis in (*AXIS_NAMES, "ep"):
            size = getattr(self, axis)
            if not is_count(size):
                raise ConfigError(f"{axis} must be a positive number of ranks, got {size!r}")
        if sorted(self.order) != sorted(AXIS_NAMES):
            raise ConfigError(
                f"the order of the mesh must name {_NAMES} once each, outermost first, got {self.order!r}"
            )
        if (ranks := self.ranks // self.pp) % self.ep:
            product = " x ".join(axis for axis in AXIS_NAMES if axis in self.axes and axis != "pp")
            raise ConfigError(
                f"ep {self.ep} does not divide {product} = {ranks}, the ranks of a stage, over which experts are divided; "
                f"take a divisor of {ranks}"
            )

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {self.size(axis)}" for axis in self.axes)
        return axes if self.ep == 1 else f"{axes} (ep {self.ep})"

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        return math.prod(self.sizes)

    @property
    def replicas(self) -> int:
        """Number of ranks with the same parameters, whose gradients are summed: dp x cp."""
        return math.prod(self.size(axis) for axis in REPLICATED)

    @property
    def tensor_ranks(self) -> int:
        """Number of ranks that share the parameters of a stage of one replica: tp."""
        return self.ranks // (self.pp * self.replicas)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in their order, without those that could divide samples and do not."""
        return tuple(axis for axis in self.order if axis not in REPLICATED[1:] or self.size(axis) > 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the `axes`, in their order."""
        return tuple(self.size(axis) for axis in self.axes)

    def size(self, axis: str) -> int:
        """Return the number of ranks on an axis."""
        if axis not in AXIS_NAMES:
            raise ConfigError(
                f"there is no axis {axis!r}{nearest(axis, list(AXIS_NAMES))}; the axes are {_NAMES}"
            )
        size: int = getattr(self, axis)
        return size

    def coordinate(self, rank: int, axis: str) -> int:
        """Return a rank's coordinate on an axis."""
        self.size(axis)
        if not 0 <= rank < self.ranks:
            raise ConfigError(f"there is no rank {rank} in a mesh of {self}, which has {self.ranks}")
        inner = self.order[self.order.index(axis) + 1 :]
        return rank // math.prod(self.size(a) for a in inner) % self.size(axis)

    def rank(self, pp: int = 0, dp: int = 0, tp: int = 0, **others: int) -> int:
        """Return the rank at these coordinates; those of other axes by name, 0 where one is missing."""
        coordinates = {"pp": pp, "dp": dp, "tp": tp, **others}
        for axis in coordinates:
            self.size(axis)
        rank = 0
        for axis in self.order:
            coordinate = coordinates.get(axis, 0)
            if not 0 <= coordinate < self.size(axis):
                raise ConfigError(
                    f"{axis} = {coordinate} is not in a mesh of {self}; it must be 0 to {self.size(axis) - 1}"
                )
            rank = rank * self.size(axis) + coordinate
        return rank

    def line(self, rank: int, axis: str) -> list[int]:
        """Return the ranks that differ from `rank` only on an axis, itself included, in their order on it."""
        coordinates = {a: self.coordinate(rank, a) for a in AXIS_NAMES}
        return [self.rank(**{**coordinates, axis: n}) for n in range(self.size(axis))]

    def replica_ranks(self, rank: int) -> list[int]:
        """Return the ranks with the same parameters as a rank, ascending."""
        return sorted(self._plane(rank, REPLICATED))

    def stage_ranks(self, rank: int) -> list[int]:
        """Return the ranks with the same coordinate on pp as a rank, those of one replica together."""
        return [r for replica in self.replica_ranks(rank) for r in self._plane(replica, SHARED)]

    def _plane(self, rank: int, axes: Sequence[str]) -> list[int]:
        """Return the ranks that differ from a rank only on some axes."""
        ranks = [rank]
        for axis in axes:
            ranks = [other for each in ranks for other in self.line(each, axis)]
        return ranks

    def expert_ranks(self, rank: int) -> list[int]:
        """Return the ranks that together have all experts of a rank's layers, ascending, in the order of their experts."""
        ranks = self.stage_ranks(rank)
        first = ranks.index(rank) // self.ep * self.ep
        return sorted(ranks[first : first + self.ep])

    def expert_replicas(self, rank: int) -> list[int]:
        """Return the ranks that have the same experts as a rank."""
        place = self.expert_ranks(rank).index(rank)
        groups = dict.fromkeys(tuple(self.expert_ranks(other)) for other in self.stage_ranks(rank))
        return [group[place] for group in groups]


REPLICATED = ("dp", *(f.name for f in fields(MeshShape) if f.metadata == _DIVIDES_SAMPLES))
"""Axes along which the ranks of a stage have the same parameters: dp, and those that divide samples."""

SHARED = ("tp",)
"""Axes along which ranks share the parameters of a stage of one replica."""

AXIS_NAMES: tuple[str, ...] = ("pp", *REPLICATED, *SHARED)
"""Axes in their default order, outermost first: ranks of tp communicate the most and should be neighbours."""

_NAMES = f"{', '.join(AXIS_NAMES[:-1])} and {AXIS_NAMES[-1]}"


@dataclass(frozen=True)
class Mesh:
    """This process in a mesh, and the groups it belongs to.

    Attributes:
        shape: sizes and order of the axes.
        rank: rank of this process in the mesh.
        device_mesh: torch's mesh; its dimensions have the names of the axes, and axes of size 1 may be missing.
        ranks: ranks of the mesh's processes in ``torch.distributed``, in the order of the axes.
    """

    shape: MeshShape
    rank: int
    device_mesh: DeviceMesh
    ranks: tuple[int, ...]

    def coordinate(self, axis: str) -> int:
        """Return this process's coordinate on an axis."""
        return self.shape.coordinate(self.rank, axis)

    @property
    def replica(self) -> int:
        """Index of this process among those with the same parameters; those that divide a sample are neighbours."""
        index = 0
        for axis in REPLICATED:
            index = index * self.shape.size(axis) + self.coordinate(axis)
        return index

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the group of processes that differ from this one only on an axis, itself included."""
        self.shape.size(axis)
        return self.device_mesh.get_group(axis)

    def groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of all dimensions."""
        return [self.group(axis) for axis in AXIS_NAMES if axis in (self.device_mesh.mesh_dim_names or ())]

    def line(self, rank: int, axis: str) -> list[int]:
        """Return the processes that differ from a rank of the mesh only on an axis, as ranks in ``torch.distributed``."""
        return [self.ranks[other] for other in self.shape.line(rank, axis)]

    def axis(self, axis: str) -> DeviceMesh:
        """Return the one-dimensional mesh of `group`, for ``parallelize_module``."""
        self.shape.size(axis)
        return self.device_mesh[axis]


def make_mesh(
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    *,
    order: Sequence[str] = AXIS_NAMES,
    device: str = "cpu",
    **others: int,
) -> Mesh:
    """Make a mesh of all processes; every process calls it, with ``torch.distributed`` initialised.

    Args:
        pp, dp, tp: number of ranks on each axis (default 1).
        order: axes, outermost first (default pp, dp, cp, tp).
        device: device type of the groups (default "cpu").
        others: ``cp`` and ``ep``, the ranks that divide the tokens of a sample and the experts, see `MeshShape` (default 1).

    Raises:
        ConfigError: if the product of the sizes is not the number of processes.
    """
    return open_mesh(MeshShape(pp, dp, tp, tuple(order), **others), device)


def open_mesh(shape: MeshShape, device: str) -> Mesh:
    """Make a mesh of a shape, as `make_mesh` does."""
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        raise ConfigError(
            "a mesh is made of processes: start them with torchrun, and initialise torch.distributed"
        )
    require_fit(shape, dist.get_world_size())
    mesh = init_device_mesh(device, shape.sizes, mesh_dim_names=shape.axes)
    return Mesh(shape, dist.get_rank(), mesh, tuple(range(shape.ranks)))


def require_fit(shape: MeshShape, processes: int) -> None:
    """Check that a mesh has as many ranks as there are processes."""
    if shape.ranks == processes:
        return
    others = shape.ranks // shape.dp
    advice = f"start {plural(shape.ranks, 'process')}"
    if processes % others == 0:
        advice += f", or take dp = {processes // others}"
    raise ConfigError(
        f"a mesh of {shape} has {plural(shape.ranks, 'rank')}, but the launch has {plural(processes, 'process')}; {advice}"
    )


def require_threads(shape: MeshShape, program: str) -> None:
    """Check that the ranks of a mesh can be threads of one process, which is one pipeline with whole matrices."""
    if shape.ranks > shape.pp:
        raise ConfigError(
            f"a mesh of {shape} needs {plural(shape.ranks, 'process')}, one for each rank, and this is one process; start "
            f"them with torchrun --nproc-per-node {shape.ranks} {program}"
        )


_OTHER_NAMES = {
    "pp": ("pipe", "pipeline", "stage", "stages", "pipeline_parallel"),
    "dp": ("data", "ddp", "replica", "replicas", "replicate", "dp_replicate", "data_parallel", "batch"),
    "cp": ("context", "sequence", "context_parallel", "sp"),
    "tp": ("model", "tensor", "mp", "tensor_parallel"),
}


def given_mesh(mesh: object) -> tuple[MeshShape | Mesh | None, MeshShape | None]:
    """Return the mesh that a Pipeline was given, a mesh of torch with its axes by name, and its shape."""
    if mesh is None or isinstance(mesh, MeshShape):
        return mesh, mesh
    if isinstance(mesh, Mesh):
        return mesh, mesh.shape
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(mesh, DeviceMesh):
        axes = axes_of(mesh)
        return axes, axes.shape
    raise ConfigError(
        f"mesh must be a MeshShape, or a mesh of torch's init_device_mesh, got {mesh!r:.80}; write "
        "MeshShape(pp=2, dp=2)"
    )


def axes_of(mesh: DeviceMesh) -> Mesh:
    """Return this process in torch's mesh, whose dimensions may be any of the axes; those left out have size 1.

    The mesh may be a slice of a larger one, such as ``mesh["pp"]``, or have some of the processes only: its pipeline is
    then one of its processes alone.
    """
    names = _names_of(mesh)
    position = mesh.get_coordinate()
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if position is None:
        raise ConfigError(
            f"this process is not in the mesh, which has the ranks {few(ranks)}; build the pipeline in those only"
        )
    sizes: dict[str, Any] = dict(zip(names, mesh.mesh.shape, strict=True))
    order = (*(axis for axis in AXIS_NAMES if axis not in sizes), *names)
    shape = MeshShape(**sizes, order=order)
    for axis, dimension in zip(names, range(len(names)), strict=True):
        if (mesh.mesh.diff(dim=dimension) <= 0).any():
            raise ConfigError(
                f"the ranks of the mesh must ascend along {axis}, got {mesh.mesh.tolist()}; make it with init_device_mesh"
            )
    coordinates = dict(zip(names, position, strict=True))
    return Mesh(shape, shape.rank(**coordinates), mesh, tuple(ranks))


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    size = " x ".join(str(n) for n in mesh.mesh.shape)
    if not names:
        raise ConfigError(
            f"the dimensions of the mesh ({size}) must have names of {_NAMES}; write init_device_mesh(..., "
            "mesh_dim_names=('pp', 'dp'))"
        )
    if strange := [name for name in names if name not in AXIS_NAMES]:
        meant = {
            name: next((a for a, others in _OTHER_NAMES.items() if name in others), None) for name in strange
        }
        advice = ", ".join(f"call {name} {axis}" for name, axis in meant.items() if axis)
        raise ConfigError(
            f"the dimensions of the mesh must be called {_NAMES}, got {', '.join(names)} ({size}); "
            + (advice or f"give the slice of the mesh without {', '.join(strange)}")
        )
    return tuple(names)
