"""Reductions hide where the rank still computes; what outlasts it is exposed."""

from __future__ import annotations

import pytest

from penstock.base.errors import ConfigError
from penstock.simulate.reduction import reduce_gradients
from penstock.trace.events import Activity
from tests.support.simulated import built, timed


def reductions(trace, rank):
    rows = [n for n in range(len(trace)) if trace.rank[n] == rank and trace.kind[n] == Activity.REDUCE]
    return [(int(trace.stage[n]), float(trace.start[n]), float(trace.end[n])) for n in rows]


def test_the_last_rank_is_done_first_and_its_reduction_hides_in_the_cool_down_of_nobody_but_itself():
    program = built("1f1b", 2, 2)
    trace = timed(program, 1, 1, 1)
    # Rank 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7. Rank 0 ends with B1 at 7-9.
    found = reduce_gradients(program, trace, [3, 3])
    assert reductions(found.trace, 0) == [(0, 9, 12)]
    assert reductions(found.trace, 1) == [(1, 7, 10)]
    assert found.exposed == (3, 3)
    assert found.total == (3, 3)


def test_buckets_start_while_the_last_backward_runs():
    program = built("1f1b", 2, 2)
    trace = timed(program, 1.0, 1.0, 1.0)
    found = reduce_gradients(program, trace, [3, 3], 4)
    # The last backward of rank 0 lasts from 7 to 9: a quarter is complete every half.
    assert reductions(found.trace, 0) == [(0, 7.5, 8.25), (0, 8.25, 9.0), (0, 9.0, 9.75), (0, 9.75, 10.5)]
    assert found.exposed == (1.5, 1.5)


def test_of_several_stages_the_later_one_hides_behind_the_earlier_ones_work():
    program = built("interleaved-1f1b", 2, 4, 2)
    trace = timed(program, 1.0, 1.0, 1.0)
    found = reduce_gradients(program, trace, [0.5] * 4)
    for rank in range(2):
        done = reductions(found.trace, rank)
        assert [stage for stage, _, _ in done] == [rank + 2, rank]  # the deeper stage is complete first
        assert found.exposed[rank] == 0.5
    assert (found.trace.start[1:] >= found.trace.start[:-1])[
        found.trace.rank[1:] == found.trace.rank[:-1]
    ].all()


def test_times_and_buckets_that_cannot_be_are_refused():
    program = built("1f1b", 2, 2)
    trace = timed(program, 1, 1, 1)
    with pytest.raises(ConfigError, match=r"each of the 2 stages, got \[1\]"):
        reduce_gradients(program, trace, [1])
    with pytest.raises(ConfigError, match=r"buckets must be .* got 0"):
        reduce_gradients(program, trace, [1, 1], 0)
