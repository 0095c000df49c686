"""A recalibrated cluster predicts the step that it was calibrated on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.base.errors import ConfigError
from penstock.plan.cluster import Cluster, Device, LinkSpeed
from penstock.plan.fitting import recalibrate, residuals
from penstock.plan.op_costs import op_costs
from penstock.plan.prediction import predict
from penstock.plan.profile.model_profile import of_shape
from penstock.plan.profile.model_shape import ModelShape
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan

PROFILE = of_shape(
    ModelShape(name="small", layers=8, hidden=64, heads=4, kv_heads=2, head_size=16, ffn=128, vocabulary=256)
)
CLUSTER = Cluster(
    name="two nodes",
    device=Device(memory=1e9, matmul={"fp32": 1e9}, memory_bandwidth=1e9),
    ranks_per_node=2,
    nodes=2,
    node=LinkSpeed(1e-3, 1e7),
    network=LinkSpeed(2e-3, 1e6),
    dtype="fp32",
)


@pytest.mark.parametrize(
    "layout", ["pp=4", "pp=2,v=2,schedule=interleaved-1f1b", "pp=4,v=2,schedule=zb-v", "pp=1"]
)
def test_a_recalibrated_cluster_predicts_the_measured_step(layout: str):
    def predicted(cluster: Cluster):
        return predict(PROFILE, cluster, layout, sequence=32, batch=8)

    real = replace(
        CLUSTER,
        slowdown=1.7,
        step_overhead=0.25,
        node=LinkSpeed(3e-3, 1e7 / 3),
        network=LinkSpeed(6e-3, 1e6 / 3),
    )
    first, truth = predicted(CLUSTER), predicted(real)
    measured = op_costs(truth.costs, real, truth.layout)
    seconds = float(makespan(simulate(truth.program, measured))) + real.step_overhead
    rows = residuals(first, CLUSTER, measured, seconds)
    corrected = recalibrate(CLUSTER, rows)
    assert corrected.slowdown == pytest.approx(1.7)
    assert predicted(corrected).step_seconds == pytest.approx(truth.step_seconds)
    ratios = {row.term: row.measured / row.predicted for row in rows if row.predicted}
    assert ratios["forward"] == pytest.approx(1.7)
    if "message" in ratios:
        assert ratios["message"] == pytest.approx(3)


def test_a_run_with_other_stages_is_refused():
    two, four = (predict(PROFILE, CLUSTER, f"pp={pp}", sequence=32, batch=8) for pp in (2, 4))
    with pytest.raises(ConfigError, match="the run has 4 stages, but the layout has 2"):
        residuals(two, CLUSTER, op_costs(four.costs, CLUSTER, four.layout), 1.0)
