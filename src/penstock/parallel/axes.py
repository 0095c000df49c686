"""The axes of a mesh beside the pipeline's, in the order in which they prepare layers."""

from __future__ import annotations

from penstock.parallel.axis import Axis, Processes
from penstock.parallel.context.axis import Context
from penstock.parallel.experts.axis import Experts
from penstock.parallel.mesh import Mesh, MeshShape
from penstock.parallel.tensor.axis import Tensor

AXES: tuple[type[Axis], ...] = (
    Tensor,  # first: experts take their part of the tokens that its processes have in common
    Experts,
    Context,  # last, since it gives whole layers a forward
)


def used_axes(shape: MeshShape | None) -> list[type[Axis]]:
    """Return the axes on which a mesh has more than one process."""
    return [] if shape is None else [axis for axis in AXES if getattr(shape, axis.name) > 1]


def axes_of(processes: Processes, mesh: Mesh) -> tuple[Axis, ...]:
    """Return the axes that a mesh has; every process of the run calls it."""
    return tuple(axis(processes, mesh) for axis in used_axes(mesh.shape))
