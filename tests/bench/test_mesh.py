"""The quick part of bench.mesh: eight processes, two ranks on each axis."""

from __future__ import annotations

import pytest
from bench.mesh import MESHES, deviation, zero_rows

from penstock.runtime.local import LocalProcesses


def test_two_ranks_on_each_axis_are_one_process_to_summation_order():
    with LocalProcesses(8) as pool:
        for name in ("1f1b", "zb-v", "dualpipe"):
            found = deviation(pool, MESHES[-1], name, 3)
            assert found["same bits"]
            assert max(found["losses"], found["gradients"], found["weights"]) < 5e-6


def test_zero_is_the_whole_optimizer_with_its_share_of_the_bytes(processes: LocalProcesses):
    for row in zero_rows(processes, 3):
        assert row["same bits"]
        assert row["weights"] < 1e-6
        assert max(row["bytes"]) == pytest.approx(row["plain bytes"] / row["replicas"], rel=1e-3)
