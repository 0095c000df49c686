"""Costs of the runtime in predictions, and clusters that are corrected by a run, which predict that run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.base.errors import ConfigError
from penstock.plan.cluster import Cluster, Device, LinkSpeed
from penstock.plan.fitting import recalibrate, residuals
from penstock.plan.op_costs import op_costs
from penstock.plan.prediction import predict
from penstock.plan.run_layout import Layout
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_profile import Profile, ProfiledLayer, RuntimeCosts, of_shape
from penstock.profile.model_shape import ModelShape
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan

CLUSTER = Cluster(
    name="here", ranks_per_node=4, dtype="fp32",
    device=Device(memory=1e12, matmul={"fp32": 1e12}, memory_bandwidth=1e10),
)  # fmt: skip


def profile(factors: dict[str, float], overhead: float) -> Profile:
    base = {"forward": 0.010, "input_grad": 0.011, "weight_grad": 0.008, "backward": 0.018, "again": 0.009}
    works = {name: (DeviceWork("seconds", s * factors.get(name, 1.0)),) for name, s in base.items()}
    kind = ProfiledLayer(((1, LayerCost(**works)),))
    entries = tuple((str(n), "block", 0) for n in range(8))
    return Profile(name="m", source="measured", kinds=(kind,), layers=entries, op_overhead=overhead)


def seconds(model: Profile, layout: Layout, batch: int = 16) -> float:
    return predict(model, CLUSTER, layout, sequence=1, batch=batch).step_seconds


def test_an_op_beside_another_takes_as_long_as_the_two_compete():
    alone = replace(profile({}, 0.0), runtime=RuntimeCosts(beside_forward=1.0))
    gpipe, plain = Layout(pp=2, v=1, schedule="gpipe"), profile({}, 0.0)
    forward = 64 * 4 * 0.010
    # The forwards of the two ranks overlap, but for one at each end; backwards do not compete.
    assert seconds(alone, gpipe, 64) - seconds(plain, gpipe, 64) == pytest.approx(forward, rel=0.03)


def test_halves_of_the_first_stage_that_follow_each_other_take_a_whole_backward():
    prediction = predict(profile({}, 0.0), CLUSTER, "pp=2,schedule=zb-h1", sequence=1, batch=8)
    trace = prediction.trace
    spent = trace.end - trace.start
    first = trace.stage == 0
    assert spent[first & (trace.kind == 2)].max() <= 4 * 0.018 + 1e-9


PROFILE = of_shape(
    ModelShape(name="small", layers=8, hidden=64, heads=4, kv_heads=2, head_size=16, ffn=128, vocabulary=256)
)
TWO_NODES = Cluster(
    name="two nodes", device=Device(memory=1e9, matmul={"fp32": 1e9}, memory_bandwidth=1e9), ranks_per_node=2, nodes=2,
    node=LinkSpeed(1e-3, 1e7), network=LinkSpeed(2e-3, 1e6), dtype="fp32",
)  # fmt: skip


@pytest.mark.parametrize(
    "layout", ["pp=4", "pp=2,v=2,schedule=interleaved-1f1b", "pp=4,v=2,schedule=zb-v", "pp=1"]
)
def test_a_recalibrated_cluster_predicts_the_measured_step(layout: str):
    def predicted(cluster: Cluster):
        return predict(PROFILE, cluster, layout, sequence=32, batch=8)

    links = {"node": LinkSpeed(3e-3, 1e7 / 3), "network": LinkSpeed(6e-3, 1e6 / 3)}
    real = replace(TWO_NODES, slowdown=1.7, step_overhead=0.25, **links)
    first, truth = predicted(TWO_NODES), predicted(real)
    measured = op_costs(truth.costs, real, truth.layout)
    seconds = float(makespan(simulate(truth.program, measured))) + real.step_overhead
    rows = residuals(first, TWO_NODES, measured, seconds)
    corrected = recalibrate(TWO_NODES, rows)
    assert corrected.slowdown == pytest.approx(1.7)
    assert predicted(corrected).step_seconds == pytest.approx(truth.step_seconds)
    ratios = {row.term: row.measured / row.predicted for row in rows if row.predicted}
    assert ratios["forward"] == pytest.approx(1.7)
    if "message" in ratios:
        assert ratios["message"] == pytest.approx(3)


def test_a_run_with_other_stages_is_refused():
    two, four = (predict(PROFILE, TWO_NODES, f"pp={pp}", sequence=32, batch=8) for pp in (2, 4))
    with pytest.raises(ConfigError, match="the run has 4 stages, but the layout has 2"):
        residuals(two, TWO_NODES, op_costs(four.costs, TWO_NODES, four.layout), 1.0)
