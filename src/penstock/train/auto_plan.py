"""``penstock train --plan auto``: profile the model on this machine, choose schedule, microbatches and split, and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.plan.explore.branch_and_bound import search
from penstock.plan.explore.search_space import divisors
from penstock.plan.prediction import Prediction
from penstock.profile.measured import Effort, measure_layers
from penstock.runtime.measuring.busy_ranks import measure_cluster
from penstock.train.config.config import Config
from penstock.train.config.mesh_config import THREADS
from penstock.train.model.trainable import build_model

_MAX_ROWS = 8
_SECONDS = 20.0


def choose_plan(config: Config, report: Callable[[str], object]) -> Config:
    """Return a config with the layout that is predicted to take least time on this machine.

    The ranks are threads of this process, so ``parallel.dp`` and ``parallel.tp`` stay 1; ``parallel.pp`` stays as given.

    Args:
        config: a checked config.
        report: function that prints a line.

    Raises:
        ConfigError: if the run has replicas or tensor parallelism, or no layout fits in memory.
    """
    parallel = config.parallel
    if parallel.dp * parallel.tp > 1:
        raise ConfigError(
            f"--plan auto plans a run with threads, got parallel.dp = {parallel.dp} and parallel.tp = {parallel.tp}; plan a "
            "run with processes by `penstock plan`, on a cluster file that `penstock doctor --measure` writes"
        )
    ranks = parallel.pp or THREADS
    sequence, batch = config.data.sequence, config.train.batch
    model = build_model(config)
    tokens = torch.randint(model.vocabulary, (1, sequence + 1), generator=torch.Generator().manual_seed(0))
    given = tokens[:, :sequence]
    target = given if model.target_is_input else tokens[:, 1:]
    sizes = divisors(batch, _MAX_ROWS)
    report(f"measuring the model's layers with {ranks} ranks busy ...")
    profile = measure_layers(
        model.layers, given, target=target, loss_fn=model.loss_fn, microbatches=sorted({sizes[0], sizes[-1]}), ranks=ranks,
        effort=Effort(seconds=_SECONDS), name="model", seed=config.train.seed,
    )  # fmt: skip
    fixed: dict[str, Any] = {"pp": ranks, "dp": 1, "tp": 1}
    result = search(
        profile, measure_cluster(ranks), sequence=sequence, batch=batch, fixed=fixed, devices=ranks, top=1
    )
    best = result.best
    report(
        f"planned {best.layout}: {1e3 * best.step_seconds:.4g} ms a step expected ({1e3 * best.low:.4g} to "
        f"{1e3 * best.high:.4g}), the best of {result.evaluated:,} layouts"
    )
    return with_plan(config, best)


def with_plan(config: Config, plan: Prediction) -> Config:
    """Return a config with a plan's layout."""
    layout, costs = plan.layout, plan.costs
    assert costs is not None, "the prediction is of a whole step"
    split: Any = "even" if layout.split == "even" else list(costs.counts)
    schedule = replace(
        config.schedule,
        name=layout.schedule,
        microbatches=config.train.batch // layout.microbatch,
        split=split,
    )
    parallel = replace(config.parallel, pp=layout.pp, virtual_stages=layout.v)
    recompute: Any = "none" if layout.recompute == "selective" else layout.recompute
    return replace(
        config, schedule=schedule, parallel=parallel, runtime=replace(config.runtime, recompute=recompute)
    )
