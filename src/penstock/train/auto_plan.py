"""``penstock train --plan auto``: profile the model on this machine, choose schedule, microbatches and split, and go.

A run that is resumed on as many ranks as before keeps its layout, so its numbers stay the same bit for bit, and nothing is
measured again. On fewer or more it is planned again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.base import host
from penstock.base.counts import plural
from penstock.base.errors import ConfigError
from penstock.measure.busy_ranks import measure_cluster
from penstock.parallel.mesh import MeshShape
from penstock.plan.explore.branch_and_bound import search
from penstock.plan.explore.search_space import divisors
from penstock.plan.run_layout import Layout
from penstock.profile.measured import Effort, Exchange, measure_layers
from penstock.profile.model_profile import Profile
from penstock.runtime.health.hang import Timeout
from penstock.runtime.start.place import current_place
from penstock.runtime.workers.run_group import RunGroup
from penstock.show.units import interval_text
from penstock.train import run_folder
from penstock.train.config import file as config_file
from penstock.train.config.config import Config, from_mapping
from penstock.train.config.resolve import find_mesh, shape_of
from penstock.train.config.sections import ParallelConfig
from penstock.train.device import choose_device, sharing_cores
from penstock.train.model.precision import autocast_of
from penstock.train.model.trainable import TrainableModel, build_model

_ELSEWHERE = "plan it by `penstock plan`, on a cluster file that `penstock doctor --measure` writes"
# Most samples of the microbatches that are measured.
_MAX_ROWS = 8
# For the measurement, and for the search after it.
_SECONDS = 20.0


def choose_plan(config: Config, report: Callable[[str], object]) -> Config:
    """Return a config with the layout that is predicted to take least time on this machine.

    All ranks measure at the same time: threads of this process, or all processes of the run; every process calls it. The
    first one then chooses for all. The degrees of ``[parallel]`` stay as given. A run that ``train.resume`` continues at the
    degrees of its last start keeps the layout of that start.
    """
    place = current_place()
    shape = find_mesh(config.parallel, place.size if place is not None else None)
    config = replace(config, parallel=replace(config.parallel, pp=shape.pp))
    run_group = RunGroup.meet(Timeout(config.runtime.timeout, config.runtime.first_timeout))
    kept = run_group.decide(lambda: _kept_config(config))
    before = from_mapping(tomllib.loads(kept)) if kept else None
    if before is not None and shape_of(before.parallel) == shape:
        if run_group.leads:
            report(f"the layout stays that of the last start, which had {plural(shape.ranks, 'rank')} too")
        return _with_layout_of(config, before)
    _require_measurable(config, in_processes=run_group.size > 1)
    _require_one_machine(run_group.each(host.machine))
    model = build_model(config)
    blocks = sum(layer.role == "block" for layer in model.layers)
    if shape.pp > blocks:
        raise ConfigError(
            f"the model's {blocks} blocks cannot be split into {plural(shape.pp, 'stage')}; "
            f"take at most {plural(blocks, 'pipeline rank')}"
        )
    with sharing_cores(shape.ranks, config.runtime.threads, in_processes=place is not None) as threads:
        torch.set_num_threads(threads)
        if place is None or place.rank == 0:
            report(f"measuring the model's layers with {shape.ranks} ranks busy ...")
        cluster = measure_cluster(shape.ranks, dp=shape.ranks if shape.dp > 1 else 1)
        profile = _measure(config, model, shape, run_group)

    def choose() -> tuple[dict[str, Any], tuple[int, ...]]:
        fixed = {"pp": shape.pp, "dp": shape.dp, "tp": 1, **_sharding(config.parallel, shape.dp)}
        sequence, batch, ranks = config.data.sequence, config.train.batch, shape.ranks
        # The other processes wait meanwhile, and must not give up.
        limit = min(_SECONDS, config.runtime.timeout / 2)
        result = search(
            profile, cluster, sequence=sequence, batch=batch, fixed=fixed, devices=ranks, top=1, limit=limit
        )
        best = result.best
        report(
            f"planned {best.layout}: {1e3 * best.step_seconds:.4g} ms per step expected "
            f"({interval_text(best.low, best.high)}), the best of {result.evaluated:,} layouts"
        )
        assert best.costs is not None, "the prediction is of a whole step"
        return best.layout.as_dict(), best.costs.counts

    values, counts = run_group.decide(choose)
    return with_plan(config, Layout(**values), counts)


def _kept_config(config: Config) -> str:
    """Return the config, as TOML, of the last start of the run that ``train.resume`` names; empty for a run that begins."""
    if not config.train.resume:
        return ""
    kept = run_folder.run_of(config.train) / "config.toml"
    return config_file.dump(config_file.load(kept)) if kept.is_file() else ""


def _with_layout_of(config: Config, other: Config) -> Config:
    """Return a config with the layout of another one: what a plan decides."""
    return replace(
        config,
        schedule=other.schedule,
        parallel=other.parallel,
        runtime=replace(config.runtime, recompute=other.runtime.recompute),
    )


def _require_measurable(config: Config, *, in_processes: bool) -> None:
    """Raise `ConfigError` for a run whose layers do not run here as they are measured."""
    if config.parallel.cp > 1:
        raise ConfigError(
            f"--plan auto plans whole samples, so parallel.cp must be 1, got {config.parallel.cp}; set schedule and split"
        )
    if config.parallel.tp > 1:
        raise ConfigError(
            f"--plan auto measures whole layers, so parallel.tp must be 1, got {config.parallel.tp}; {_ELSEWHERE}"
        )
    device = choose_device(config.runtime.device, in_processes=in_processes)
    if device.type != "cpu":
        raise ConfigError(
            f"--plan auto measures layers on the CPU, but the run is on {device}; set runtime.device=cpu, or {_ELSEWHERE}"
        )


def _require_one_machine(machines: Sequence[str]) -> None:
    """Raise `ConfigError` for processes on several machines, each given by its identifier."""
    others = sum(machine != machines[0] for machine in machines)
    if others:
        raise ConfigError(
            f"--plan auto plans for one machine, but {others} of {len(machines)} processes are on others; {_ELSEWHERE}"
        )


def _sharding(parallel: ParallelConfig, replicas: int) -> dict[str, Any]:
    """Return what replicas divide or a store keeps, as keys of a layout."""
    shard = "optimizer" if parallel.zero and parallel.shard == "none" else parallel.shard
    given: dict[str, Any] = {"window": parallel.window, "reduce_every": parallel.reduce_every}
    given = {key: value for key, value in given.items() if value is not None}
    if parallel.store != "none":
        return {"store": parallel.store, **given}
    return {"shard": shard, **given} if replicas > 1 else {"shard": "none"}


def _measure(config: Config, model: TrainableModel, shape: MeshShape, run_group: RunGroup) -> Profile:
    """Return the profile of a model's layers, the same on every process."""
    sequence = config.data.sequence
    tokens = torch.randint(model.vocabulary, (1, sequence + 1), generator=torch.Generator().manual_seed(0))
    given = tokens[:, :sequence]
    sizes = divisors(config.train.batch // shape.dp, _MAX_ROWS)
    exchange: Exchange | None = (lambda value: run_group.each(lambda: value)) if run_group.size > 1 else None
    return measure_layers(
        model.layers,
        given,
        target=given if model.target_is_input else tokens[:, 1:],
        loss_fn=model.loss_fn,
        microbatches=sorted({sizes[0], sizes[-1]}),
        ranks=1 if exchange is not None else shape.ranks,
        effort=Effort(seconds=_SECONDS),
        exchange=exchange,
        name="model",
        seed=config.train.seed,
        autocast=autocast_of(config.runtime.precision),
    )


def with_plan(config: Config, layout: Layout, counts: tuple[int, ...]) -> Config:
    """Return a config with a plan's layout."""
    split: Any = "even" if layout.split == "even" else list(counts)
    schedule = replace(
        config.schedule,
        name=layout.schedule,
        microbatches=config.train.batch // layout.microbatch,
        split=split,
    )
    parallel = replace(config.parallel, pp=layout.pp, virtual_stages=layout.v)
    if layout.sharding.weights_come_and_go:
        parallel = replace(parallel, window=layout.window)
    recompute: Any = "none" if layout.recompute == "selective" else layout.recompute
    return replace(
        config, schedule=schedule, parallel=parallel, runtime=replace(config.runtime, recompute=recompute)
    )
