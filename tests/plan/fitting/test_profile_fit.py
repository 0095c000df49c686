from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.plan.cluster import Cluster, Device
from penstock.plan.fitting import MeasuredLayout, fit_profile
from penstock.plan.prediction import predict
from penstock.plan.profile.layer_cost import DeviceWork, LayerCost
from penstock.plan.profile.model_profile import Profile, ProfiledLayer, RuntimeCosts
from penstock.plan.run_layout import Layout

CLUSTER = Cluster(
    name="here",
    device=Device(memory=1e12, matmul={"fp32": 1e12}, memory_bandwidth=1e10),
    ranks_per_node=4,
    dtype="fp32",
)
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


def seconds(model: Profile, layout: Layout) -> float:
    return predict(model, CLUSTER, layout, sequence=1, batch=16).step_seconds


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
            forward=0.001,
            backward=0.001,
            input_grad=0.001,
            weight_grad=0.001,
            beside_forward=0.9,
            beside_backward=0.2,
            beside_input_grad=0.3,
        ),
    ],
    ids=["factors", "the runtime's seconds", "side by side"],
)
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
    assert seconds_of(alone, gpipe) - seconds_of(plain, gpipe) == pytest.approx(forward, rel=0.03)


def seconds_of(model: Profile, layout: Layout) -> float:
    return predict(model, CLUSTER, layout, sequence=1, batch=64).step_seconds


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
