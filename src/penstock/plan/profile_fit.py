"""Recalibration of a profile on measured steps: how much longer ops take in a pipeline than their layers took alone.

In a pipeline, layers compete for caches, memory and the interpreter with other ranks. One factor for each kind of op, and
one overhead for all, are fitted to the steps by least squares of relative errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.plan.cluster import Cluster
from penstock.plan.prediction import predict
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import StageCosts, layer_times, stage_costs
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_profile import Profile, ProfiledLayer
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.trace.bubbles import makespan
from penstock.trace.events import Trace

_TRIMMED = 0.1
"""Share of an op's times that is left out at each end, before their mean is taken."""
_TERMS = ("forward", "input_grad", "weight_grad", "backward", "again")


@dataclass(frozen=True)
class MeasuredLayout:
    """Traces of a layout's steps, of all ranks.

    Attributes:
        layout: the layout.
        placement: placement of its stages.
        sequence: tokens of a sample.
        traces: the steps.
    """

    layout: Layout
    placement: Placement
    sequence: int
    traces: Sequence[Trace]


def fit_profile(profile: Profile, cluster: Cluster, runs: Sequence[MeasuredLayout]) -> Profile:
    """Return the profile with factors that fit the measured steps.

    Args:
        profile: profile whose costs are seconds.
        cluster: cluster of the runs.
        runs: measured layouts; kinds of op that none of them has keep their costs.
    """
    factors = np.ones(len(_TERMS) + 1)
    factors[-1] = 0.0
    # Forwards that prepare a split backward take longer. A schedule knows one forward, so the difference counts as the
    # backward's first half, and whole backwards have to be fitted first.
    for split in (False, True):
        rows: list[npt.NDArray[np.float64]] = []
        for run in runs:
            seconds = op_seconds(run.traces)
            if any(kind == Kind.W for _, kind in seconds) != split:
                continue
            times = layer_times(profile, cluster, run.layout, run.sequence)
            costs = stage_costs(times, run.layout, run.placement)
            for (stage, kind), spent in seconds.items():
                terms = np.append(_terms(costs, stage, kind), 1.0)
                if split and kind == Kind.F:
                    continue
                if split and kind == Kind.I:
                    forward = np.append(_terms(costs, stage, Kind.F), 1.0)
                    spent += max(0.0, seconds[stage, Kind.F] - float(forward @ factors))
                rows.append(np.append(terms, spent))
        if rows:
            _fit(np.array(rows), factors, first=not split)
    scales = dict(zip(_TERMS, np.clip(factors[:-1], 0.2, 5.0).tolist(), strict=True))
    kinds = tuple(
        ProfiledLayer(tuple((size, _scaled(cost, scales)) for size, cost in kind.points))
        for kind in profile.kinds
    )
    return _with_gaps(replace(profile, kinds=kinds, op_overhead=float(factors[-1])), cluster, runs)


def _with_gaps(profile: Profile, cluster: Cluster, runs: Sequence[MeasuredLayout]) -> Profile:
    """Return the profile with the time between ops, sends and receives included, as further overhead of each op."""
    gaps = []
    for run in runs:
        microbatches = int(run.traces[0].microbatch.max()) + 1
        batch = run.layout.dp * run.layout.microbatch * microbatches
        prediction = predict(profile, cluster, run.layout, sequence=run.sequence, batch=batch)
        measured = float(np.mean([makespan(trace) for trace in run.traces]))
        gaps.append((measured - prediction.parts["pipeline"]) * run.layout.pp / len(run.traces[0]))
    return replace(profile, op_overhead=max(0.0, profile.op_overhead + float(np.median(gaps))))


def _fit(rows: npt.NDArray[np.float64], factors: npt.NDArray[np.float64], first: bool) -> None:
    """Fit the factors of those terms that occur in the rows, in place; the overhead only at first, and at least 0.

    Args:
        rows: seconds of each of `_TERMS`, 1 for the overhead, and measured seconds, of every op.
        factors: factors of the terms, and the overhead.
        first: True if the overhead is to be fitted.
    """
    spent = rows[:, -1:]
    table, target = rows[:, :-1] / spent, np.ones(len(rows))
    free = np.append((rows[:, : len(_TERMS)] > 0).any(axis=0), first)
    for _ in range(2):
        fixed = 0.0 if free[-1] else table[:, -1] * factors[-1]
        factors[free] = np.linalg.lstsq(table[:, free], target - fixed, rcond=None)[0]
        if factors[-1] >= 0:
            return
        factors[-1], free[-1] = 0.0, False


def op_seconds(traces: Sequence[Trace]) -> dict[tuple[int, Kind], float]:
    """Return the mean seconds of the ops of every stage and kind, without the extremes."""
    found: dict[tuple[int, Kind], list[float]] = {}
    for trace in traces:
        spent = (trace.end - trace.start).tolist()
        merged = _merged(trace)
        for row, (stage, kind) in enumerate(zip(trace.stage.tolist(), trace.kind.tolist(), strict=True)):
            if kind < len(Kind) and not merged[row]:
                found.setdefault((stage, Kind(kind)), []).append(spent[row])
    return {cell: _trimmed_mean(values) for cell, values in found.items()}


def _merged(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return which rows are halves of a backward that follow each other at once, which may run as one."""
    pairs = np.zeros(len(trace), np.bool_)
    first = np.flatnonzero(
        (trace.kind[:-1] == Kind.I)
        & (trace.kind[1:] == Kind.W)
        & (trace.stage[:-1] == 0)
        & (trace.stage[1:] == 0)
        & (trace.microbatch[:-1] == trace.microbatch[1:])
    )
    pairs[first] = pairs[first + 1] = True
    return pairs


def _trimmed_mean(values: list[float]) -> float:
    ordered = sorted(values)
    cut = int(_TRIMMED * len(ordered))
    return float(np.mean(ordered[cut : len(ordered) - cut]))


def _terms(costs: StageCosts, stage: int, kind: Kind) -> npt.NDArray[np.float64]:
    """Return the seconds of each of `_TERMS` in an op."""
    parts = {
        Kind.F: ("forward",),
        Kind.B: ("backward", "again"),
        Kind.I: ("input_grad", "again"),
        Kind.W: ("weight_grad",),
        Kind.R: ("forward",),
    }[kind]
    return np.array([getattr(costs, name)[stage] if name in parts else 0.0 for name in _TERMS])


def _scaled(cost: LayerCost, scales: dict[str, float]) -> LayerCost:
    works: dict[str, Any] = {
        name: tuple(
            DeviceWork(work.unit, work.amount * factor, work.width, work.calls)
            for work in getattr(cost, name)
        )
        for name, factor in scales.items()
    }
    return replace(cost, **works)
