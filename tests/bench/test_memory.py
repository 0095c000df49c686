"""The measured peaks of activations are there, and are those that the schedule predicts."""

from __future__ import annotations

import pytest
from bench.memory import measured, predicted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_measured_peaks_are_those_predicted(name: str):
    for found, expected in zip(measured(name, 4), predicted(name, 4), strict=True):
        assert found > 0
        assert found == pytest.approx(expected, rel=0.05)
