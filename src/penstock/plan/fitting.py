"""Where a prediction of a run was wrong, by term, and the cluster that corrects it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.base.errors import ConfigError
from penstock.plan.cluster import Cluster, LinkSpeed
from penstock.plan.op_costs import op_costs
from penstock.plan.prediction import Prediction
from penstock.schedule.ops import Kind
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan

_AFTER = "reduction, optimizer, rest"
_KINDS_OF_TERM = {"forward": (Kind.F,), "backward": (Kind.B, Kind.I, Kind.W), "recompute": (Kind.R,)}


class Residual(NamedTuple):
    """One term of a step, as predicted and as measured."""

    term: str
    # Seconds; of ops in the mean over the ranks, of a message in the mean over the boundaries.
    predicted: float
    measured: float


def residuals(
    prediction: Prediction, cluster: Cluster, measured: Costs, seconds: float, step: float | None = None
) -> tuple[Residual, ...]:
    """Compare a prediction with a run of the same layout.

    `seconds` are from the first op of a step to its last, `step` is the whole step's (None if unknown).
    """
    program, stage_costs = prediction.program, prediction.costs
    assert program is not None, "the prediction is of a whole step"
    assert stage_costs is not None, "the prediction is of a whole step"
    schedule = program.schedule
    if measured.stages != schedule.stages:
        raise ConfigError(f"the run has {measured.stages} stages, but the layout has {schedule.stages}")
    predicted = op_costs(stage_costs, cluster, prediction.layout)
    counts = np.zeros((schedule.stages, len(Kind)))
    np.add.at(counts, (schedule.stage, schedule.kind), 1)
    rows = []
    for term, kinds in _KINDS_OF_TERM.items():
        ran = counts[:, kinds]
        if ran.any():
            both = ((costs.seconds[:, kinds] * ran).sum() / schedule.ranks for costs in (predicted, measured))
            rows.append(Residual(term, *(float(value) for value in both)))
    if schedule.ranks > 1:
        both = (costs.communication.transfer(schedule.stages).mean() for costs in (predicted, measured))
        rows.append(Residual("message", *(float(value) for value in both)))
    order = float(makespan(simulate(program, measured)))
    rows.append(Residual("waits between ops", 0.0, max(0.0, seconds - order)))
    pipeline = prediction.parts["pipeline"]
    rows.append(Residual("pipeline", pipeline, seconds))
    if step is not None:
        rows.append(Residual(_AFTER, prediction.step_seconds - pipeline, max(0.0, step - seconds)))
        rows.append(Residual("step", prediction.step_seconds, step))
    return tuple(rows)


def recalibrate(cluster: Cluster, rows: tuple[Residual, ...]) -> Cluster:
    """Return the cluster whose prediction has the measured terms.

    Ops get one factor, messages another; waits between ops count as overhead of a step, and so does what follows the
    pipeline beyond its prediction.
    """
    by_term = {row.term: row for row in rows}
    ops = [by_term[term] for term in _KINDS_OF_TERM if term in by_term]
    predicted, measured = sum(row.predicted for row in ops), sum(row.measured for row in ops)
    slowdown = cluster.slowdown * (measured / predicted if predicted > 0 and measured > 0 else 1.0)
    overhead = cluster.step_overhead + by_term["waits between ops"].measured
    if _AFTER in by_term:
        overhead = max(0.0, overhead + by_term[_AFTER].measured - by_term[_AFTER].predicted)
    changed = replace(cluster, slowdown=slowdown, step_overhead=overhead)
    message = by_term.get("message")
    if message is None or message.predicted <= 0 or message.measured <= 0:
        return changed
    factor = message.measured / message.predicted

    def slower(link: LinkSpeed) -> LinkSpeed:
        reduces = None if link.reduce_bandwidth is None else link.reduce_bandwidth / factor
        return LinkSpeed(link.latency * factor, link.bandwidth / factor, reduces)

    return replace(changed, node=slower(cluster.node), network=slower(cluster.network))
