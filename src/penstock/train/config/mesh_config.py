"""The mesh of a run: from ``[parallel]`` to axes that fit the number of processes."""

from __future__ import annotations

from penstock.base.counts import plural
from penstock.base.errors import ConfigError
from penstock.parallel.mesh import MeshShape, require_fit, require_threads
from penstock.train.config.fields import axes_of
from penstock.train.config.sections.layout_section import ParallelConfig

THREADS = 2
"""Pipeline ranks where neither the config nor a launcher gives a number."""


def shape_of(parallel: ParallelConfig) -> MeshShape:
    """Return the mesh of a resolved config."""
    assert parallel.pp is not None, "resolved"
    return MeshShape(parallel.pp, parallel.dp, parallel.tp, axes_of(parallel.order))


def find_mesh(parallel: ParallelConfig, processes: int | None) -> MeshShape:
    """Return the mesh of a config for the number of processes that were started.

    Args:
        parallel: a checked ``[parallel]``; an unset ``pp`` becomes the processes that ``dp`` and ``tp`` leave, or `THREADS`.
    """
    pp, replicas = parallel.pp, parallel.dp * parallel.tp
    if processes is not None and pp is None and processes % replicas:
        raise ConfigError(
            f"{plural(processes, 'process')} cannot be divided into pipelines with parallel.dp = {parallel.dp} and "
            f"parallel.tp = {parallel.tp}; start {replicas} or a multiple of it"
        )
    if processes is not None and replicas == 1 and pp not in (None, processes):
        raise ConfigError(
            f"parallel.pp is {pp}, but the launch has {plural(processes, 'process')}; leave it unset or start {pp}"
        )
    if pp is None:
        pp = THREADS if processes is None else processes // replicas
    shape = MeshShape(pp, parallel.dp, parallel.tp, axes_of(parallel.order))
    if processes is not None:
        require_fit(shape, processes)
    else:
        require_threads(shape, "-m penstock train ..., or set parallel.dp=1 and parallel.tp=1")
    return shape


def processes_of(parallel: ParallelConfig) -> int:
    """Return the number of processes a run needs, one for each rank, where no launcher has started any."""
    return (parallel.pp or THREADS) * parallel.dp * parallel.tp


def describe(shape: MeshShape) -> str:
    """Return the number of ranks, with the axes where there are more than the pipeline's."""
    ranks = plural(shape.ranks, "rank")
    return ranks if shape.ranks == shape.pp else f"{ranks} ({shape})"
