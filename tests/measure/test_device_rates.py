"""Rates of a device: fits that are exact for exact points, and a real measurement that a cluster's file can hold."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base import host
from penstock.measure import device_rates
from penstock.measure.device_rates import (
    fit_line,
    measure_device,
    steady_seconds,
    usable_dtypes,
)

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


def test_rates_are_those_of_a_device_whose_times_are_known(monkeypatch: pytest.MonkeyPatch):
    rate, width, bandwidth, launch = 1e9, 50.0, 2e9, 1e-5

    def seconds(job: Any, device: torch.device, budget: float) -> float:
        """Of a product or an addition of tensors, by their sizes; else those of an attention."""
        if not isinstance(job, partial):
            return launch + 4 * 4 * 512 * 512 * 64 / rate
        left, right = job.args
        if job.func is torch.add:
            return launch + 3 * 4 * left.numel() / bandwidth
        sizes = (*left.shape, right.shape[1])
        return launch + 2 * math.prod(sizes) / rate * (1 + width * sum(1 / size for size in sizes) / 3)

    monkeypatch.setattr(device_rates, "steady_seconds", seconds)
    monkeypatch.setattr(torch, "zeros", torch.empty)  # memory that nobody touches
    rates, half = device_rates._matmul(CPU, launch, 0.0)
    assert rates == {"fp32": pytest.approx(rate, rel=1e-6)}
    assert half == pytest.approx(width, rel=1e-6)
    assert device_rates._attention(CPU, "fp32", launch, 0.0) == pytest.approx(rate, rel=1e-6)
    assert device_rates.memory_bandwidth(CPU, launch, 0.0) == pytest.approx(bandwidth, rel=1e-6)


@pytest.mark.slow
def test_rates_are_positive_and_for_every_dtype(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_rates, "_PASSES", 2)
    rates = measure_device(CPU, 2, 0.01)
    assert usable_dtypes(CPU) == ["fp32"]
    assert set(rates["matmul"]) == set(rates["attention"]) == {"fp32"}
    assert rates.pop("matmul_width") >= 0
    assert all(rate > 0 for rate in (*rates.pop("matmul").values(), *rates.pop("attention").values()))
    assert sorted(rates) == ["launch", "memory", "memory_bandwidth", "optimizer_bandwidth", "spread"]
    assert rates.pop("spread") >= 0
    assert all(rate > 0 for rate in rates.values())
    assert rates["memory"] == host.memory().total // 2
