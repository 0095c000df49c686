"""The last step of reading a config: values that depend on the processes and on the memory of this machine.

The mesh is one of them: ``[parallel]`` becomes axes that fit the number of processes.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.base import host
from penstock.base.counts import plural
from penstock.base.errors import ConfigError
from penstock.parallel.mesh import MeshShape, require_fit, require_threads
from penstock.schedule.families import require_family
from penstock.schedule.text import is_csv
from penstock.train.config.config import Config
from penstock.train.config.fields import axes_of
from penstock.train.config.sections import ParallelConfig
from penstock.train.data.tokenizer import BYTES

THREADS = 2
"""Pipeline ranks where neither the config nor a launcher gives a number."""


def shape_of(parallel: ParallelConfig) -> MeshShape:
    """Return the mesh of a resolved config."""
    assert parallel.pp is not None, "resolved"
    return _shape(parallel, parallel.pp)


def _shape(parallel: ParallelConfig, pp: int) -> MeshShape:
    return MeshShape(pp, parallel.dp, parallel.tp, axes_of(parallel.order), ep=parallel.ep, cp=parallel.cp)


def find_mesh(parallel: ParallelConfig, processes: int | None) -> MeshShape:
    """Return the mesh of a config for the number of processes that were started.

    Args:
        parallel: a checked ``[parallel]``; an unset ``pp`` becomes the processes that the other axes leave, or `THREADS`.
    """
    pp, replicas = parallel.pp, parallel.dp * parallel.cp * parallel.tp
    if processes is not None and pp is None and processes % replicas:
        raise ConfigError(
            f"{plural(processes, 'process')} cannot be divided into pipelines with parallel.dp = {parallel.dp}, "
            f"parallel.cp = {parallel.cp} and parallel.tp = {parallel.tp}; start {replicas} or a multiple of it"
        )
    if processes is not None and replicas == 1 and pp not in (None, processes):
        raise ConfigError(
            f"parallel.pp is {pp}, but the launch has {plural(processes, 'process')}; leave it unset or start {pp}"
        )
    if pp is None:
        pp = THREADS if processes is None else processes // replicas
    shape = _shape(parallel, pp)
    if processes is not None:
        require_fit(shape, processes)
    else:
        require_threads(shape, "-m penstock train ..., or set parallel.dp=1, parallel.cp=1 and parallel.tp=1")
    return shape


def describe(shape: MeshShape) -> str:
    """Return the number of ranks, with the axes where there are more than the pipeline's."""
    ranks = plural(shape.ranks, "rank")
    return ranks if shape.ranks == shape.pp else f"{ranks} ({shape})"


_BYTES_PER_TOKEN = 24
"""Three int64: token, input and target."""


def resolve(config: Config, processes: int | None) -> Config:
    """Fill in what depends on how the command was started."""
    pp = find_mesh(config.parallel, processes).pp
    if config.parallel.pp is None and processes is None and not (config.model.path or config.model.config):
        pp = min(pp, config.model.layers)
    v = config.parallel.virtual_stages
    if not is_csv(config.schedule.name):
        v = require_family(config.schedule.name).require_counts(
            pp, config.schedule.microbatches // config.parallel.dp, v
        )
    _require_memory(config)
    sample = config.sample
    if sample.prompt is None:
        hugging_face = config.model.path or config.model.config
        prompt = "" if hugging_face else "def " if config.model.vocabulary == BYTES else "0"
        sample = replace(sample, prompt=prompt)
    return replace(config, parallel=replace(config.parallel, pp=pp, virtual_stages=v or 1), sample=sample)


def _require_memory(config: Config) -> None:
    """Raise if the tokens of the held-out batches alone do not fit in the memory of this machine or container."""
    here, train = host.memory(), config.train
    needed = train.batch * train.eval_batches * config.data.sequence * _BYTES_PER_TOKEN
    if here is not None and needed > here.total:
        raise ConfigError(
            f"train.eval_batches {train.eval_batches:,} of train.batch {train.batch:,} samples with data.sequence "
            f"{config.data.sequence:,} tokens take about {needed / 1e9:,.0f} GB of memory, and there are "
            f"{here.total / 1e9:,.0f} GB here; take fewer"
        )
