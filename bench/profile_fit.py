"""Recalibration of a profile on measured steps: what ops cost in a pipeline besides what their layers cost alone.

In a pipeline, ops have the runtime's own work in addition to the layers', and compete with other ranks for the interpreter,
caches and memory. A factor for each kind of op and the `RuntimeCosts` are fitted to the ops by least squares of relative
errors; what the steps then still take longer goes to every op, and to every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.plan.cluster import Cluster
from penstock.plan.op_costs import split_shares
from penstock.plan.prediction import predict, step_program
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import StageCosts, layer_times, stage_costs
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_profile import Profile, ProfiledLayer, RuntimeCosts
from penstock.schedule.ops import Kind
from penstock.trace.beside import time_beside
from penstock.trace.events import Trace
from penstock.trace.join import merged_halves

Table = npt.NDArray[np.float64]

_TRIMMED = 0.1
"""Share of an op's times that is left out at each end, before their mean is taken."""
_TERMS = ("forward", "backward", "input_grad", "weight_grad", "again")
_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
# Parameters in order: 5 factors of `_TERMS`, then 6 additions and 4 shares of `RuntimeCosts`. Shares begin above 0, because
# the model has products of two shares, which have no slope at 0.
_START = np.array([1.0] * 5 + [0.0] * 6 + [0.3] * 4)
_SIZE = np.array([0.5] * 5 + [0.1] * 4 + [0.05] * 2 + [1.0] * 4)
"""Usual size of each parameter: changes of the factors of `_TERMS`, and the fields of `RuntimeCosts`; those in seconds are
shares of the mean op."""
_LEAST = np.array([0.2] * 5 + [0.0] * 10)
_MOST = np.array([5.0] * 5 + [1.0] * 6 + [3.0] * 4)
_PRIOR = 0.005
"""Weight of the expectation that layers cost what they cost alone, against the relative error of one op."""
_BESIDE = 11
"""Number of the first parameter that is a share in which an op competes."""


@dataclass(frozen=True)
class MeasuredLayout:
    """Steps of a layout."""

    layout: Layout
    sequence: int  # tokens of a sample
    seconds: Sequence[float]  # seconds of each step on the slowest rank
    traces: Sequence[Trace]

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a step."""
        return int(self.traces[0].microbatch.max()) + 1


class _Cell(NamedTuple):
    """Mean op of one stage and kind."""

    seconds: float
    work: Table  # seconds of `_TERMS` in it, shape (terms,)
    added: Table  # how often it has each field of `RuntimeCosts` that is an addition, shape (6,)
    kind: int  # index of `_KINDS`
    beside: Table  # mean number of other ranks that run an op of each of `_KINDS` meanwhile, shape (kinds,)
    # Share of a backward of each of `_KINDS` on the other ranks that recomputes, shape (kinds,).
    repeated: Table


def fit_profile(profile: Profile, cluster: Cluster, runs: Sequence[MeasuredLayout]) -> Profile:
    """Return the profile with factors and `RuntimeCosts` that fit the measured steps.

    Kinds of op that no run has keep their costs.
    """
    cells = [cell for run in runs for cell in _cells(profile, cluster, run)]
    ranks = max(run.layout.pp for run in runs)
    parameters = _fit(cells, beside=ranks > 1)
    scales = dict(zip(_TERMS, parameters[: len(_TERMS)].tolist(), strict=True))
    kinds = tuple(
        ProfiledLayer(tuple((size, _scaled(cost, scales)) for size, cost in kind.points))
        for kind in profile.kinds
    )
    names = (f.name for f in fields(RuntimeCosts))
    runtime = RuntimeCosts(**dict(zip(names, parameters[len(_TERMS) :].tolist(), strict=True)))
    fitted = replace(profile, kinds=kinds, runtime=runtime, op_overhead=0.0, step_overhead=0.0)
    return _with_gaps(fitted, cluster, runs)


def _cells(profile: Profile, cluster: Cluster, run: MeasuredLayout) -> list[_Cell]:
    layout = run.layout
    program = step_program(layout.schedule, layout.pp, run.microbatches, layout.v)
    times = layer_times(profile, cluster, layout, run.sequence)
    costs = stage_costs(times, layout, program.schedule.placement)
    layers = np.diff(costs.starts) * split_shares(program)
    repeated = np.zeros(len(_KINDS))
    again = float(costs.again.sum())
    for kind, part in ((Kind.B, costs.backward), (Kind.I, costs.input_grad)):
        repeated[_KINDS.index(kind)] = again / max(again + float(part.sum()), 1e-12)
    cells = []
    for (stage, kind), (seconds, beside) in ops_of(run.traces).items():
        added = np.zeros(6)
        added[_KINDS.index(kind)] = 1.0
        if kind == Kind.F:
            added[4:] = layers[stage], costs.segments[stage] - 1
        cells.append(_Cell(seconds, _work(costs, stage, kind), added, _KINDS.index(kind), beside, repeated))
    return cells


def _work(costs: StageCosts, stage: int, kind: Kind) -> Table:
    """Return the seconds of each of `_TERMS` in an op."""
    work = np.zeros(len(_TERMS))
    term = _KINDS.index(kind)
    work[term] = getattr(costs, _TERMS[term])[stage]
    if kind in (Kind.B, Kind.I):
        work[-1] = costs.again[stage]
    return work


def ops_of(traces: Sequence[Trace]) -> dict[tuple[int, Kind], tuple[float, Table]]:
    """Return the mean op of every stage and kind, without extremes and merged pairs of I and W.

    An op is its seconds, and the mean number of other ranks that run an F, B, I and W meanwhile, shape (4,).
    """
    found: dict[tuple[int, Kind], list[tuple[float, Table]]] = {}
    for trace in traces:
        rows = np.flatnonzero(np.isin(trace.kind, _KINDS))
        merged = merged_halves(trace)[rows]
        length = (trace.end[rows] - trace.start[rows]).astype(np.float64)
        beside = np.stack(
            [time_beside(trace, rows, (trace.kind[rows] == kind).astype(np.float64)) for kind in _KINDS],
            axis=1,
        )
        for n, row in enumerate(rows.tolist()):
            if not merged[n]:
                cell = int(trace.stage[row]), Kind(int(trace.kind[row]))
                found.setdefault(cell, []).append((float(length[n]), beside[n]))
    return {cell: _trimmed(ops) for cell, ops in found.items()}


def _trimmed(ops: list[tuple[float, Table]]) -> tuple[float, Table]:
    ordered = sorted(ops, key=lambda op: op[0])
    cut = int(_TRIMMED * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    seconds = sum(length for length, _ in kept)
    beside = np.sum([time for _, time in kept], axis=0) / max(seconds, 1e-12)
    return seconds / len(kept), beside


def _fit(cells: Sequence[_Cell], beside: bool) -> Table:
    """Return the parameters with least squared errors, by the method of Levenberg and Marquardt within bounds."""
    seconds = np.array([cell.seconds for cell in cells])
    work = np.array([cell.work for cell in cells])
    added = np.array([cell.added for cell in cells])
    kind = np.array([cell.kind for cell in cells])
    company = np.array([cell.beside for cell in cells])
    repeated = np.array([cell.repeated for cell in cells])
    used = np.concatenate([work.any(axis=0), added.any(axis=0), np.isin(range(4), kind) & beside])
    size = _SIZE.copy()
    size[len(_TERMS) : _BESIDE] *= float(seconds.mean())
    start = np.where(used, _START, np.where(_START == 1.0, 1.0, 0.0))

    def errors(parameters: Table) -> Table:
        factors, shares = parameters[: len(_TERMS)], parameters[_BESIDE:]
        main = (work[:, :-1] @ factors[:-1]) + added @ parameters[len(_TERMS) : _BESIDE]
        again = work[:, -1] * factors[-1]
        # What is recomputed competes as a forward does, here and in the other ranks' backwards.
        own = (shares[kind] * main + shares[0] * again) / np.maximum(main + again, 1e-12)
        others = (company * (shares + repeated * (shares[0] - shares))).sum(axis=1)
        predicted = (main + again) * (1.0 + own * others)
        prior = _PRIOR * (parameters - np.where(_START == 1.0, 1.0, 0.0)) / size
        return np.concatenate([predicted / seconds - 1.0, prior])

    free = np.flatnonzero(used)
    # With little damping a step is that of Gauss and Newton, with much a short one along the gradient: a step that helps
    # lowers it, and one that does not is tried again with more.
    parameters, found, damping = start, errors(start), 1e-2
    for _ in range(200):
        slopes = np.empty((len(found), len(free)))
        for column, n in enumerate(free):
            moved = parameters.copy()
            moved[n] += 1e-4 * size[n]
            slopes[:, column] = (errors(moved) - found) / 1e-4
        move = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(free)), -slopes.T @ found)
        trial = parameters.copy()
        trial[free] = np.clip(trial[free] + move * size[free], _LEAST[free], _MOST[free])
        there = errors(trial)
        gain = float(found @ found - there @ there)
        if gain <= 0:
            damping *= 5
            # No step helps any more, however short: a minimum, or a corner of the bounds.
            if damping > 1e9:
                break
            continue
        parameters, found, damping = trial, there, max(damping / 5, 1e-12)
        if gain < 1e-12:
            break
    return parameters


def _with_gaps(profile: Profile, cluster: Cluster, runs: Sequence[MeasuredLayout]) -> Profile:
    """Return the profile with the seconds that whole steps take longer than predicted: of each op, and of each step."""
    counts, missing, scale = [], [], []
    for run in runs:
        batch = run.layout.dp * run.layout.microbatch * run.microbatches
        prediction = predict(profile, cluster, run.layout, sequence=run.sequence, batch=batch)
        measured = float(np.mean(run.seconds))
        ops = int((run.traces[0].kind < len(Kind)).sum())
        counts.append(ops / run.layout.pp)
        missing.append(measured - prediction.step_seconds + prediction.parts["optimizer"])
        scale.append(measured)
    weights = 1.0 / np.sqrt(np.array(scale))
    table = np.stack([np.array(counts), np.ones(len(counts))], axis=1) * weights[:, None]
    target = np.array(missing) * weights
    best: Any = None
    # Least squares with values of at least 0, by trying which of the two is 0.
    for free in ([0, 1], [0], [1]):
        values = np.zeros(2)
        values[free] = np.linalg.lstsq(table[:, free], target, rcond=None)[0]
        error = float(np.sum((table @ values - target) ** 2))
        if (values >= 0).all() and (best is None or error < best[0]):
            best = error, values
    of_op, of_step = (0.0, 0.0) if best is None else best[1].tolist()
    return replace(profile, op_overhead=of_op, step_overhead=of_step)


def _scaled(cost: LayerCost, scales: dict[str, float]) -> LayerCost:
    works: dict[str, Any] = {
        name: tuple(
            DeviceWork(work.unit, work.amount * factor, work.width, work.calls)
            for work in getattr(cost, name)
        )
        for name, factor in scales.items()
    }
    return replace(cost, **works)
