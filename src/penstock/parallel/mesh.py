"""Ranks on three axes: pipeline (pp), data (dp) and tensor parallelism (tp).

By default tp is innermost, since its ranks talk the most and should be neighbours, and pp outermost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import distributed as dist

from penstock.errors import BatchError, ConfigError, nearest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class MeshShape:
    """Where every rank is.

    Attributes:
        pp, dp, tp: ranks on each axis.
        order: the axes, outermost first; neighbouring ranks differ in the last one.

    Raises:
        ConfigError: sizes that are not positive, or an order that is not of these axes.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"{axis} must be a positive number of ranks, not {size!r}")
        if sorted(self.order) != sorted(AXES):
            raise ConfigError(
                f"the order of the mesh must name pp, dp and tp once each, outermost first; it is {self.order!r}"
            )

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.size(axis)}" for axis in self.order)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes, in their order."""
        return tuple(self.size(axis) for axis in self.order)

    def size(self, axis: str) -> int:
        """Ranks on an axis."""
        if axis not in AXES:
            raise ConfigError(
                f"there is no axis {axis!r}{nearest(axis, list(AXES))}; the axes are pp, dp and tp"
            )
        found: int = getattr(self, axis)
        return found

    def coordinate(self, rank: int, axis: str) -> int:
        """A rank's place on an axis."""
        self.size(axis)
        if not 0 <= rank < self.ranks:
            raise ConfigError(f"there is no rank {rank} in a mesh of {self}, which has {self.ranks}")
        inner = self.order[self.order.index(axis) + 1 :]
        return rank // math.prod(self.size(a) for a in inner) % self.size(axis)

    def rank(self, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        """The rank at a place."""
        place = {"pp": pp, "dp": dp, "tp": tp}
        found = 0
        for axis in self.order:
            if not 0 <= place[axis] < self.size(axis):
                raise ConfigError(
                    f"{axis} = {place[axis]} is not in a mesh of {self}; it must be 0 to {self.size(axis) - 1}"
                )
            found = found * self.size(axis) + place[axis]
        return found

    def line(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from this one on an axis alone, itself included, in their order on it."""
        place = {a: self.coordinate(rank, a) for a in AXES}
        return [self.rank(**{**place, axis: n}) for n in range(self.size(axis))]


@dataclass(frozen=True)
class Mesh:
    """This process in the mesh, and the groups it belongs to.

    Attributes:
        shape: where every rank is.
        rank: this process.
        device_mesh: the same for torch, with one dimension an axis, named as it.
    """

    shape: MeshShape
    rank: int
    device_mesh: DeviceMesh

    def coordinate(self, axis: str) -> int:
        """This process's place on an axis."""
        return self.shape.coordinate(self.rank, axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The processes that differ from this one on an axis alone, itself included."""
        self.shape.size(axis)
        return self.device_mesh.get_group(axis)

    def axis(self, axis: str) -> DeviceMesh:
        """The one-dimensional mesh of `group`, for ``parallelize_module``."""
        self.shape.size(axis)
        return self.device_mesh[axis]


def make_mesh(
    pp: int = 1, dp: int = 1, tp: int = 1, *, order: Sequence[str] = AXES, device: str = "cpu"
) -> Mesh:
    """The mesh of all processes; every process calls it, with ``torch.distributed`` initialised.

    Args:
        pp, dp, tp: ranks on each axis.
        order: the axes, outermost first.
        device: the type of device that the groups are for.

    Raises:
        ConfigError: sizes that do not multiply to the number of processes.
    """
    from torch.distributed.device_mesh import init_device_mesh

    shape = MeshShape(pp, dp, tp, tuple(order))
    if not dist.is_initialized():
        raise ConfigError(
            "a mesh is made of processes: start them with torchrun, and initialise torch.distributed"
        )
    require_fit(shape, dist.get_world_size())
    mesh = init_device_mesh(device, shape.sizes, mesh_dim_names=shape.order)
    return Mesh(shape, dist.get_rank(), mesh)


def require_fit(shape: MeshShape, processes: int) -> None:
    """Check a mesh against a number of processes.

    Raises:
        ConfigError: they differ; says what would fit.
    """
    if shape.ranks == processes:
        return
    others = shape.pp * shape.tp
    advice = f"start {shape.ranks} processes"
    if processes % others == 0:
        advice += f", or take dp = {processes // others}"
    raise ConfigError(
        f"a mesh of {shape} has {shape.ranks} ranks, but there are {processes} processes; {advice}"
    )


def replica_rows(rows: int, replicas: int, replica: int) -> slice:
    """Which rows of the global batch are a replica's: equal runs, in order, so that together they are the batch.

    Used on a batch's sample ids, it makes every replica's samples depend on the step alone.

    Args:
        rows: of the global batch.
        replicas: how many share it.
        replica: which, from 0.

    Raises:
        BatchError: rows that do not divide.
    """
    if not 0 <= replica < replicas:
        raise ConfigError(f"there is no replica {replica} among {replicas}")
    if rows % replicas or rows < 1:
        fits = max(rows // replicas, 1) * replicas
        raise BatchError(
            f"a batch of {rows} rows does not divide over dp = {replicas}; take {fits} or another multiple of {replicas}"
        )
    each = rows // replicas
    return slice(replica * each, (replica + 1) * each)
