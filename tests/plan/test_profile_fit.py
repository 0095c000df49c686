from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.plan.cluster import Cluster, Device
from penstock.plan.prediction import predict
from penstock.plan.profile_fit import MeasuredLayout, fit_profile
from penstock.plan.run_layout import Layout
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_profile import Profile, ProfiledLayer

CLUSTER = Cluster("here", Device(1e12, {"fp32": 1e12}, 1e10), ranks_per_node=4, dtype="fp32")
LAYOUTS = [
    Layout(2, v=1, schedule="1f1b"),
    Layout(2, v=2, schedule="interleaved-1f1b"),
    Layout(2, v=1, schedule="zb-h1"),
    Layout(2, v=1, schedule="1f1b", recompute="full"),
]


def profile(factors: dict[str, float], overhead: float) -> Profile:
    base = {"forward": 0.010, "input_grad": 0.011, "weight_grad": 0.008, "backward": 0.018, "again": 0.009}
    works = {name: (DeviceWork("seconds", s * factors.get(name, 1.0)),) for name, s in base.items()}
    kind = ProfiledLayer(((1, LayerCost(**works)),))
    entries = tuple((str(n), "block", 0) for n in range(8))
    return Profile("m", "measured", kinds=(kind,), layers=entries, op_overhead=overhead)


def runs(truth: Profile) -> list[MeasuredLayout]:
    found = []
    for layout in LAYOUTS:
        prediction = predict(truth, CLUSTER, layout, sequence=1, batch=8)
        found.append(MeasuredLayout(layout, prediction.program.schedule.placement, 1, [prediction.trace]))
    return found


def test_factors_of_ops_and_their_overhead_are_found_from_steps():
    truth = profile(
        {"forward": 1.3, "backward": 1.2, "input_grad": 1.25, "weight_grad": 0.9, "again": 1.1}, 0.002
    )
    fitted = fit_profile(profile({}, 0.0), CLUSTER, runs(truth))
    assert fitted.op_overhead == pytest.approx(0.002, rel=1e-6)
    (_, cost), (_, expected) = fitted.kinds[0].points[0], truth.kinds[0].points[0]
    for name in ("forward", "backward", "input_grad", "weight_grad", "again"):
        assert getattr(cost, name)[0].amount == pytest.approx(getattr(expected, name)[0].amount, rel=1e-6)


def test_kinds_of_op_that_never_ran_keep_their_costs():
    truth = profile({"forward": 1.3}, 0.0)
    fitted = fit_profile(profile({}, 0.0), replace(CLUSTER, op_overhead=0.0), runs(truth)[:2])
    cost = fitted.kinds[0].points[0][1]
    assert cost.weight_grad[0].amount == 0.008
    assert cost.forward[0].amount == pytest.approx(0.013, rel=1e-6)


def test_halves_of_the_first_stage_that_follow_each_other_take_a_whole_backward():
    prediction = predict(profile({}, 0.0), CLUSTER, "pp=2,schedule=zb-h1", sequence=1, batch=8)
    trace = prediction.trace
    spent = trace.end - trace.start
    first = trace.stage == 0
    assert spent[first & (trace.kind == 2)].max() <= 4 * 0.018 + 1e-9
