"""Where the ranks of a run are: from ``[parallel]`` to a mesh that fits the processes there are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.parallel.mesh import AXES, MeshShape, require_fit

if TYPE_CHECKING:
    from penstock.train.config.config import Config, ParallelConfig

THREADS = 2
"""Pipeline ranks where nothing says how many."""


def axes_of(order: str) -> tuple[str, ...]:
    """The axes that a text names, outermost first."""
    return tuple(axis.strip() for axis in order.split(","))


def is_order(order: str) -> bool:
    """Whether it names every axis once."""
    return sorted(axes_of(order)) == sorted(AXES)


def shape_of(parallel: ParallelConfig) -> MeshShape:
    """The mesh of a resolved config."""
    assert parallel.pp is not None, "resolved"
    return MeshShape(parallel.pp, parallel.dp, parallel.tp, axes_of(parallel.order))


def find_mesh(parallel: ParallelConfig, processes: int | None) -> MeshShape:
    """The mesh that is meant.

    Args:
        parallel: checked. Where ``pp`` is not set it is what `processes` leave for it, or `THREADS`.
        processes: how many there are; None for one process, whose threads share matrices as they are.

    Raises:
        ConfigError: sizes that do not multiply to the number of processes; says what would fit.
    """
    pp, beside = parallel.pp, parallel.dp * parallel.tp
    if processes is not None and pp is None and processes % beside:
        raise ConfigError(
            f"{processes} processes do not divide into pipelines with parallel.dp = {parallel.dp} and parallel.tp = "
            f"{parallel.tp}; start {beside} or a multiple of it"
        )
    if processes is not None and beside == 1 and pp not in (None, processes):
        raise ConfigError(
            f"parallel.pp is {pp}, but {processes} processes were started; leave it unset or start {pp}"
        )
    if pp is None:
        pp = THREADS if processes is None else processes // beside
    shape = MeshShape(pp, parallel.dp, parallel.tp, axes_of(parallel.order))
    if processes is not None:
        require_fit(shape, processes)
    elif shape.tp > 1:
        raise ConfigError(
            f"a mesh of {shape} needs {shape.ranks} processes; start them with "
            f"torchrun --nproc-per-node {shape.ranks} -m penstock train"
        )
    return shape


def processes_of(parallel: ParallelConfig) -> int:
    """How many processes a run takes, one a rank, if nobody has started any."""
    return (parallel.pp or THREADS) * parallel.dp * parallel.tp


def require_shares(config: Config) -> None:
    """Check what is divided among the ranks of an axis, but for the model.

    Raises:
        ConfigError: it does not divide; says what would.
    """
    parallel, m = config.parallel, config.schedule.microbatches
    if m % parallel.dp:
        raise ConfigError(
            f"schedule.microbatches {m} do not divide over parallel.dp {parallel.dp}: every replica does an equal share of "
            f"the batch; take a multiple of {parallel.dp}, or parallel.dp = {math.gcd(m, parallel.dp)}"
        )
    if parallel.zero and not parallel.bucket_bytes and parallel.dp > 1:
        raise ConfigError(
            "parallel.zero keeps the buckets that it begins with, and parallel.bucket_bytes = 0 chooses them later; give a "
            "number of bytes"
        )
    if parallel.sequence_parallel and config.data.sequence % parallel.tp:
        raise ConfigError(
            f"data.sequence {config.data.sequence} does not divide over parallel.tp {parallel.tp}, which "
            f"parallel.sequence_parallel needs; take a multiple of {parallel.tp}"
        )


def describe(shape: MeshShape) -> str:
    """The mesh in a few words: how many ranks, and the axes where there is more than a pipeline's."""
    ranks = f"{shape.ranks} rank{'s' if shape.ranks != 1 else ''}"
    return ranks if shape.ranks == shape.pp else f"{ranks} ({shape})"
