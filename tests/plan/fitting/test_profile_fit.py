"""Profiles and clusters fitted to measured steps predict others, and those steps themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.base.errors import ConfigError
from penstock.plan.cluster import Cluster, Device, LinkSpeed
from penstock.plan.fitting import MeasuredLayout, fit_profile, recalibrate, residuals
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
LAYOUTS = [
    Layout(pp=2, v=1, schedule="1f1b"),
    Layout(pp=2, v=2, schedule="interleaved-1f1b"),
    Layout(pp=2, v=1, schedule="zb-h1"),
    Layout(pp=2, v=1, schedule="1f1b", recompute="full"),
    Layout(pp=2, v=1, schedule="gpipe"),
    Layout(pp=2, v=2, schedule="zb-v"),
    Layout(pp=2, v=3, schedule="interleaved-1f1b"),
]


def profile(factors: dict[str, float], overhead: float) -> Profile:
    base = {"forward": 0.010, "input_grad": 0.011, "weight_grad": 0.008, "backward": 0.018, "again": 0.009}
    works = {name: (DeviceWork("seconds", s * factors.get(name, 1.0)),) for name, s in base.items()}
    kind = ProfiledLayer(((1, LayerCost(**works)),))
    entries = tuple((str(n), "block", 0) for n in range(8))
    return Profile(name="m", source="measured", kinds=(kind,), layers=entries, op_overhead=overhead)


def runs(truth: Profile) -> list[MeasuredLayout]:
    found = []
    for layout in LAYOUTS:
        prediction = predict(truth, CLUSTER, layout, sequence=1, batch=8)
        seconds = prediction.step_seconds - prediction.parts["optimizer"]
        found.append(MeasuredLayout(layout, 1, [seconds], [prediction.trace]))
    return found


def seconds(model: Profile, layout: Layout, batch: int = 16) -> float:
    return predict(model, CLUSTER, layout, sequence=1, batch=batch).step_seconds


OTHERS = [
    Layout(pp=2, v=1, schedule="zb-h2"),
    Layout(pp=2, v=4, schedule="interleaved-1f1b"),
    Layout(pp=2, v=2, schedule="breadth-first"),
    Layout(pp=2, v=1, schedule="1f1b", recompute=2),
]


@pytest.mark.parametrize(
    "runtime",
    [
        None,
        RuntimeCosts(
            forward=0.002, backward=0.003, input_grad=0.001, weight_grad=0.002, prepare=0.0015, segment=0.001
        ),
        RuntimeCosts(
            forward=0.001, backward=0.001, input_grad=0.001, weight_grad=0.001,
            beside_forward=0.9, beside_backward=0.2, beside_input_grad=0.3,
        ),
    ],
    ids=["factors", "the runtime's seconds", "side by side"],
)  # fmt: skip
def test_layouts_that_did_not_run_are_predicted_from_those_that_did(runtime: RuntimeCosts | None):
    factors = {"forward": 1.3, "backward": 1.2, "input_grad": 1.25, "weight_grad": 0.9, "again": 1.1}
    truth = replace(profile(factors, 0.002), runtime=runtime, step_overhead=0.004)
    before = profile({}, 0.0)
    fitted = fit_profile(before, CLUSTER, runs(truth))
    for layout in OTHERS:
        expected = seconds(truth, layout)
        assert seconds(fitted, layout) == pytest.approx(expected, rel=0.03), layout
        assert abs(seconds(before, layout) / expected - 1) > 0.06, layout


def test_an_op_beside_another_takes_as_long_as_the_two_compete():
    alone = replace(profile({}, 0.0), runtime=RuntimeCosts(beside_forward=1.0))
    gpipe, plain = Layout(pp=2, v=1, schedule="gpipe"), profile({}, 0.0)
    forward = 64 * 4 * 0.010
    # The forwards of the two ranks overlap, but for one at each end; backwards do not compete.
    assert seconds(alone, gpipe, 64) - seconds(plain, gpipe, 64) == pytest.approx(forward, rel=0.03)


def test_kinds_of_op_that_never_ran_keep_their_costs():
    truth = profile({"forward": 1.3}, 0.0)
    fitted = fit_profile(profile({}, 0.0), replace(CLUSTER, op_overhead=0.0), runs(truth)[:2])
    cost = fitted.kinds[0].points[0][1]
    assert cost.weight_grad[0].amount == 0.008
    assert cost.forward[0].amount == pytest.approx(0.013, rel=0.02)


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
