"""Rates of a device: fits that are exact for exact points, and a real measurement that a cluster's file can hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base import host
from penstock.measure.device_rates import fit_line, measure_device, steady_seconds, usable_dtypes

CPU = torch.device("cpu")
SIZES = [1.0, 10.0, 300.0, 4000.0]


@settings(max_examples=20)
@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_points_on_a_line_give_that_line(intercept: float, slope: float):
    found = fit_line([(x, intercept + slope * x) for x in SIZES])
    assert found[1] == pytest.approx(slope, rel=1e-4)
    assert found[0] == pytest.approx(intercept, rel=1e-4, abs=1e-6 * slope)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(1e-9, 1e6)), min_size=1, max_size=8))
def test_no_points_give_a_negative_latency_or_rate(points: list[tuple[float, float]]):
    intercept, slope = fit_line(points)
    assert intercept >= 0
    assert slope >= 0
    assert intercept + slope > 0


def test_times_that_fall_with_size_are_a_constant():
    assert fit_line([(1, 3.0), (2, 2.0), (3, 2.0)])[1] == 0
    assert fit_line([(1, 0.5), (2, 2.0), (3, 4.0)])[0] == 0


def test_short_calls_are_timed_together():
    calls = 0

    def job() -> None:
        nonlocal calls
        calls += 1

    seconds = steady_seconds(job, CPU, 0.01)
    assert 0 < seconds * calls < 5
    assert calls > 1000


@pytest.mark.slow
def test_rates_are_positive_and_for_every_dtype():
    rates = measure_device(CPU, 2, 0.01)
    assert usable_dtypes(CPU) == ["fp32"]
    assert set(rates["matmul"]) == set(rates["attention"]) == {"fp32"}
    assert rates.pop("matmul_width") >= 0
    assert all(rate > 0 for rate in (*rates.pop("matmul").values(), *rates.pop("attention").values()))
    assert sorted(rates) == ["launch", "memory", "memory_bandwidth", "optimizer_bandwidth", "spread"]
    assert rates.pop("spread") >= 0
    assert all(rate > 0 for rate in rates.values())
    assert rates["memory"] == host.memory().total // 2
