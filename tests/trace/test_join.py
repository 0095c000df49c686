from __future__ import annotations

import numpy as np

from penstock.trace.events import Trace
from penstock.trace.join import Alignment, join, present
from tests.support.traces import trace_of

LINES = ["0F0@0.0-1.0 0B0@4.0-6.0", "1F0@1.0-2.0 1B0@2.0-4.0"]


def part(rank: int, origin: float, **info: object) -> Trace:
    """One rank's events, by a clock of its own."""
    lines = [line if r == rank else "" for r, line in enumerate(LINES)]
    return trace_of(*lines, info={"schedule": "1f1b", "origin": origin, **info})


def test_parts_of_one_clock_become_the_whole_whose_times_count_from_the_first_event():
    # Each counts from its own first event: 0.0 and 1.0.
    first, second = part(0, 50.0), part(1, 50.0)
    whole = join([second, first])
    assert whole.rank.tolist() == [0, 0, 1, 1]
    assert whole.start.tolist() == [0.0, 4.0, 1.0, 2.0]
    assert whole.info["ranks_present"] == present(whole) == [0, 1]
    assert whole.info["clock_error"] == 0.0
    late = join([part(0, 53.0), part(1, 50.0)])
    assert late.start.tolist() == [2.0, 6.0, 0.0, 1.0]
    assert late.info["origin"] == 51.0
    assert present(join([part(1, 7.0)])) == [1]


def test_clocks_are_set_by_the_first():
    clocks = Alignment(np.array([0.0, 100.0]), np.array([0.0, 0.25]))
    whole = join([part(0, 50.0), part(1, -50.0)], clocks)
    assert whole.start.tolist() == [0.0, 4.0, 1.0, 2.0]
    assert whole.info["clock_error"] == 0.25
    assert whole.info["origin"] == 50.0


def test_what_is_held_stays_with_its_event():
    parts = [Trace(**{**vars(part(r, 0.0)), "held": np.array([8 + r, r], np.int64)}) for r in (1, 0)]
    assert join(parts).held.tolist() == [8, 0, 9, 1]
    assert join([parts[0], part(0, 0.0)]).held is None
