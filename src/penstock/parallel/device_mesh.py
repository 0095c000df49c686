"""Axes of torch's device mesh, by the names of its dimensions.

The dimensions may be any of pp, dp and tp, in any order; those left out have size 1. The mesh may be a slice of a larger
one, such as ``mesh["pp"]``, or have some of the processes only: its pipeline is then one of its processes alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.base.errors import ConfigError
from penstock.parallel.mesh import AXES, Mesh, MeshShape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OTHER_NAMES = {
    "pp": ("pipe", "pipeline", "stage", "stages", "pipeline_parallel"),
    "dp": ("data", "ddp", "replica", "replicas", "replicate", "dp_replicate", "data_parallel", "batch"),
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
    """Return this process in torch's mesh."""
    names = _names_of(mesh)
    position = mesh.get_coordinate()
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if position is None:
        raise ConfigError(
            f"this process is not in the mesh, which has the ranks {_listed(ranks)}; build the pipeline in those only"
        )
    sizes: dict[str, Any] = dict(zip(names, mesh.mesh.shape, strict=True))
    order = (*(axis for axis in AXES if axis not in sizes), *names)
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
            f"the dimensions of the mesh ({size}) must have names of pp, dp and tp; write init_device_mesh(..., "
            "mesh_dim_names=('pp', 'dp'))"
        )
    if strange := [name for name in names if name not in AXES]:
        meant = {
            name: next((a for a, others in _OTHER_NAMES.items() if name in others), None) for name in strange
        }
        advice = ", ".join(f"call {name} {axis}" for name, axis in meant.items() if axis)
        raise ConfigError(
            f"the dimensions of the mesh must be called pp, dp and tp, got {', '.join(names)} ({size}); "
            + (advice or f"give the slice of the mesh without {', '.join(strange)}")
        )
    return tuple(names)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
