from __future__ import annotations

import pytest

from penstock.base.errors import ConfigError
from penstock.schedule.memory import held
from penstock.schedule.placement import Placement
from penstock.simulate.simulator import simulate
from penstock.trace.messages import memory_curve, peaks
from tests.support.simulated import built, priced, timed, written


def test_memory_is_taken_at_the_start_of_a_forward_and_given_back_at_the_end_of_a_backward():
    trace = timed(built("1f1b", 2, 3), 1, 1, 1)
    curve = memory_curve(trace, 0)
    assert curve.time.tolist() == [0, 1, 6, 6, 9, 12]
    assert curve.held.tolist() == [1, 2, 1, 2, 1, 0]
    assert memory_curve(trace, 1).time.tolist() == [1, 4, 4, 7, 7, 10]
    assert peaks(trace).tolist() == [2, 1]


def test_ops_that_change_nothing_make_no_step_and_bytes_may_be_counted():
    program = written(Placement.loop(1), 1, "0F0 0I0 0W0")
    assert memory_curve(timed(program, 1, 1, 1), 0).time.tolist() == [0, 3]
    memory = held(program.schedule, 1000, 50, freed_at="B")
    trace = simulate(program, priced(program, 1, 1, 1), memory)
    assert memory_curve(trace, 0).held.tolist() == [1000, 50, 0]
    assert peaks(trace).tolist() == [1000]


def test_a_trace_that_does_not_know_is_refused():
    trace = timed(built("1f1b", 2, 3), 1, 1, 1)
    with pytest.raises(ConfigError, match=r"rank must be one of the trace's, 0\.\.1, got 2"):
        memory_curve(trace, 2)
    object.__setattr__(trace, "held", None)
    with pytest.raises(ConfigError, match="does not say what the ranks hold"):
        peaks(trace)
