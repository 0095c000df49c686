from __future__ import annotations

import numpy as np

from penstock.trace.beside import time_beside
from tests.support.traces import trace_of


def test_seconds_of_other_ranks_ops_during_each_op_count_by_weight():
    trace = trace_of("0F0@0-4 0B0@6-8", "1F0@1-2 1B0@3-7", "2F0@7-9")
    rows = np.arange(len(trace))
    assert time_beside(trace, rows, np.ones(5)).tolist() == [2.0, 2.0, 1.0, 2.0, 1.0]
    # Rank 1 alone counts, its backward by a half.
    assert time_beside(trace, rows, np.array([0.0, 0.0, 1.0, 0.5, 0.0])).tolist() == [1.5, 0.5, 0.0, 0.0, 0.0]
    # Without its forward.
    assert time_beside(trace, rows[[0, 1, 3]], np.ones(3)).tolist() == [1.0, 1.0, 2.0]
