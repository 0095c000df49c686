"""Profiles fitted to measured steps predict other layouts' steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.profile_fit import MeasuredLayout, fit_profile

from penstock.plan.prediction import predict
from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import Profile, RuntimeCosts
from tests.plan.test_fitting import CLUSTER, profile, seconds

LAYOUTS = [
    Layout(pp=2, v=1, schedule="1f1b"),
    Layout(pp=2, v=2, schedule="interleaved-1f1b"),
    Layout(pp=2, v=1, schedule="zb-h1"),
    Layout(pp=2, v=1, schedule="1f1b", recompute="full"),
    Layout(pp=2, v=1, schedule="gpipe"),
    Layout(pp=2, v=2, schedule="zb-v"),
    Layout(pp=2, v=3, schedule="interleaved-1f1b"),
]


def runs(truth: Profile) -> list[MeasuredLayout]:
    found = []
    for layout in LAYOUTS:
        prediction = predict(truth, CLUSTER, layout, sequence=1, batch=8)
        seconds = prediction.step_seconds - prediction.parts["optimizer"]
        found.append(MeasuredLayout(layout, 1, [seconds], [prediction.trace]))
    return found


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


def test_kinds_of_op_that_never_ran_keep_their_costs():
    truth = profile({"forward": 1.3}, 0.0)
    fitted = fit_profile(profile({}, 0.0), replace(CLUSTER, op_overhead=0.0), runs(truth)[:2])
    cost = fitted.kinds[0].points[0][1]
    assert cost.weight_grad[0].amount == 0.008
    assert cost.forward[0].amount == pytest.approx(0.013, rel=0.02)
