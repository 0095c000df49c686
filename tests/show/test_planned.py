from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.base.errors import ScheduleError
from penstock.schedule.families import FAMILIES
from penstock.schedule.ops import Kind
from penstock.show.planned import costs_of, plan
from tests.support.lanes import exhaustive
from tests.support.measured import measured
from tests.support.simulated import built, timed
from tests.support.traces import trace_of

# One stage a rank and several, there and back, copied ones, whole and split backwards.
FEW = ["1f1b", "hanayo", "zb-v", "dualpipe"]


@pytest.mark.parametrize("family", [*FEW, *exhaustive(*(name for name in FAMILIES if name not in FEW))])
def test_the_plan_of_a_simulation_is_the_simulation(family):
    for latency in (0, 3):
        trace = timed(built(family, 4, 8), 8, 12, 4, latency)
        again = plan(trace).trace
        assert np.array_equal(again.start, trace.start)
        assert np.array_equal(again.end, trace.end)
        assert np.array_equal(again.held, trace.held)


def test_an_op_that_took_long_once_does_not_change_the_plan():
    trace = measured("1f1b", 2, 6)
    start, end = trace.start.copy(), trace.end.copy()
    last = trace.rank_slices()[0].stop - 1
    end[last] += 1.0
    late = plan(replace(trace, start=start, end=end))
    assert np.allclose(late.trace.end, trace.end)


def test_what_did_not_run_is_made_of_what_did_and_messages_of_waits_after_their_giver_was_done():
    whole = costs_of(trace_of("0F0@0-2 0B0@2-8")).seconds[0]
    assert whole[[Kind.I, Kind.W, Kind.R]].tolist() == [3, 3, 2]
    halves = costs_of(trace_of("0F0@0-2 0I0@2-5 0W0@5-6")).seconds[0]
    assert halves[Kind.B] == 4
    mixed = costs_of(trace_of("0F0@0-2 0B0@2-8 0F1@8-10 0I1@10-14")).seconds[0]
    assert mixed[Kind.W] == 2
    costs = costs_of(trace_of("0F0@0-2 0F1@2-4 0B0@12-16 0B1@16-20", "1F0@3-5 1B0@5-9 1F1@9-11 1B1@11-15"))
    # Ops of rank 1 waited 1 for 0F0; of rank 0 3 for 1B0, and 1 for 1B1.
    assert costs.communication.same_node.latency == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["0F0@0-1 0B0@4-6", ""], "rank 1 has no events"),
        (["0F0@0-1", "1F0@1-2 1B0@2-3"], "not a valid schedule"),
        (["OPTIMIZER@0-1"], "rank 0 has no events"),
    ],
)
def test_what_is_no_whole_step_has_no_plan(lines, message):
    with pytest.raises(ScheduleError, match=message):
        plan(trace_of(*lines))
