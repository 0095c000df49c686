from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedule.families import build_schedule
from penstock.schedule.program import lower
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.simulate.steps import StepsInARow, repeat, simulate_steps
from penstock.trace.bubbles import makespan
from penstock.trace.events import Activity
from tests.support.simulated import timeline


def steps_of(family: str, ranks: int, microbatches: int, steps: int = 3, update: float = 0) -> StepsInARow:
    schedule = build_schedule(family, ranks, microbatches, None)
    return simulate_steps(schedule, Costs.of(schedule.placement, 4, 4, 4), steps, update)


@pytest.mark.parametrize("family", ["zb-h2", "zb-v"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_steps_take_the_time_of_one_ranks_work(family: str, ranks: int):
    flow = steps_of(family, ranks, 4 * ranks)
    assert flow.flowing == flow.longest == flow.work == 12 * 4 * ranks
    assert flow.barrier > flow.flowing
    assert flow.gain == pytest.approx(1 - flow.flowing / flow.barrier)


def test_1f1b_gains_nothing_since_its_first_rank_drains_last():
    flow = steps_of("1f1b", 4, 8)
    assert flow.flowing == flow.barrier == 132
    assert flow.gain == 0


def test_the_next_steps_forwards_run_in_the_drain_of_the_step_before():
    trace = steps_of("zb-h2", 4, 8, update=2).trace
    second = (trace.kind == Activity.F) & (trace.microbatch >= 8) & (trace.microbatch < 16)
    first = (trace.microbatch >= 0) & (trace.microbatch < 8)
    assert trace.start[second].min() < trace.end[first].max()


def test_a_rank_updates_between_its_last_op_and_its_next_step():
    trace = steps_of("gpipe", 2, 1, steps=2, update=3).trace
    assert timeline_with_updates(trace, 0) == "0F0@0-4 0B0@16-24 O@24-27 0F1@27-31 0B1@43-51 O@51-54"
    assert timeline_with_updates(trace, 1) == "1F0@4-8 1B0@8-16 O@16-19 1F1@31-35 1B1@35-43 O@43-46"


def timeline_with_updates(trace, rank: int) -> str:
    rows = trace.rank_slices()[rank]
    ops = (
        f"O@{trace.start[k]}-{trace.end[k]}" if trace.kind[k] == Activity.OPTIMIZER else
        f"{trace.stage[k]}{'FBIWR'[trace.kind[k]]}{trace.microbatch[k]}@{trace.start[k]}-{trace.end[k]}"
        for k in range(rows.start, rows.stop)
    )  # fmt: skip
    return " ".join(ops)


@given(
    family=st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipe"]),
    ranks=st.sampled_from([2, 4]),
    times=st.integers(1, 3),
    costs=st.tuples(*[st.integers(1, 9)] * 3),
    update=st.integers(0, 5),
)
def test_a_step_takes_at_least_its_longest_rank_and_at_most_the_barriers_time(
    family, ranks, times, costs, update
):
    schedule = build_schedule(family, ranks, 2 * ranks * times, None)
    priced = Costs.of(schedule.placement, *costs)
    flow = simulate_steps(schedule, priced, 4, update)
    assert flow.work <= flow.longest <= flow.flowing <= flow.barrier
    once = simulate(lower(schedule), priced)
    assert makespan(once) + update == flow.barrier
    for rank in range(ranks):  # the first step is the schedule as it is
        count = len(once.rank[once.rank_slices()[rank]])
        assert timeline_with_updates(flow.trace, rank).split(" O@")[0].split(" ")[:count] == timeline(
            once, rank
        ).split(" ")


def test_the_memory_of_a_step_returns_to_nothing_before_the_next():
    flow = steps_of("zb-v", 4, 8, update=1)
    updates = flow.trace.kind == Activity.OPTIMIZER
    assert updates.sum() == 4 * 3
    assert flow.trace.held is not None
    assert (flow.trace.held[updates] == 0).all()


def test_repeated_ops_keep_their_order_and_number_their_microbatches_through():
    schedule = build_schedule("zb-h1", 2, 3, None)
    twice = repeat(schedule, 2)
    assert twice.microbatches == 6
    for rank in range(2):
        ops = schedule.text(rank).split()
        assert twice.text(rank).split()[: len(ops)] == ops
        assert np.array_equal(
            twice.columns(rank).microbatch[len(ops) :], schedule.columns(rank).microbatch + 3
        )


@pytest.mark.parametrize(("steps", "update"), [(1, 0), (2, -1)])
def test_one_step_has_no_next_one(steps: int, update: int):
    with pytest.raises(ConfigError, match="at least 2"):
        steps_of("1f1b", 2, 2, steps, update)
