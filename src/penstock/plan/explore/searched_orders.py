"""The last stage of a search for layouts: the best of them get orders of their own, searched for their costs and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.plan.explore.search_result import SearchResult
from penstock.plan.op_costs import op_costs
from penstock.plan.prediction import Prediction, predict
from penstock.plan.rank_memory import MARGIN
from penstock.profile.model_profile import Profile
from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind
from penstock.schedule.search.order_problem import BackwardMode
from penstock.schedule.text import write_csv
from penstock.simulate.certified_search import search_schedule

TRIED = 3
"""Layouts of a result that get a searched order."""


def with_searched_order(
    profile: Profile,
    result: SearchResult,
    path: Path,
    *,
    sequence: int,
    batch: int,
    seconds: float,
) -> SearchResult:
    """Search an order for the best layouts; return the result with the quickest of them first if it beats all plans.

    Only then the CSV file is written. Each layout's order is searched for `seconds`.
    """
    best: Prediction | None = None
    for plan in result.plans[:TRIED]:
        # Orders are searched for activations that come and go, not for weights and gradients that do.
        sharded = plan.layout.sharding.comes_and_goes
        if plan.layout.pp == 1 or sharded or plan.program is None or plan.costs is None:
            continue
        schedule = plan.program.schedule
        backward: BackwardMode = "split" if (schedule.kind == Kind.W).any() else "full"
        costs = op_costs(plan.costs, plan.cluster, plan.layout, profile.runtime, profile.op_overhead)
        found = search_schedule(
            schedule.placement, schedule.microbatches, costs, backward, _budget(plan), seconds=seconds
        )
        ours = predict(
            profile,
            plan.cluster,
            plan.layout,
            sequence=sequence,
            batch=batch,
            order=found.schedule,
            order_name=str(path),
        )
        least = result.best if best is None else best
        if ours.fits and ours.step_seconds < least.step_seconds * (1 - 1e-9):
            best = ours
            write_csv(found.schedule, path)
    return result if best is None else replace(result, plans=(best, *result.plans))


def _budget(plan: Prediction) -> Budget:
    """Return the bytes of activations that every rank may hold between its ops."""
    assert plan.program is not None, "the best plans are predicted in full"
    assert plan.costs is not None, "the best plans are predicted in full"
    schedule, costs = plan.program.schedule, plan.costs
    saved, waiting = (column.round().astype(np.int64) for column in (costs.saved, costs.waiting))
    free = []
    for rank, stages, most in zip(plan.memory, schedule.placement.stages_of, plan.capacities, strict=True):
        states = rank.weights + rank.gradients + rank.optimizer
        inside = float(costs.transient[list(stages)].max())
        free.append((most - states) / (1 + MARGIN) - rank.messages - rank.buckets - inside)
    budget = Budget(0, saved, waiting, freed_at="B")
    # The plan itself fits, so its order may be the first.
    limit = np.maximum(np.array(free).astype(np.int64), budget.peak(schedule))
    return replace(budget, limit=limit)
