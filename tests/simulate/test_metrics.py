"""Figures of a simulated step; and reductions, which hide where the rank still computes."""

from __future__ import annotations

import json

import pytest

from penstock.base.errors import ConfigError
from penstock.schedule.memory import held
from penstock.schedule.placement import Placement
from penstock.simulate.costs import Costs
from penstock.simulate.metrics import measure
from penstock.simulate.reduction import reduce_gradients
from penstock.simulate.simulator import simulate
from penstock.trace.events import Activity
from tests.support.simulated import built, priced, timed, written


def test_the_figures_of_1f1b():
    program = built("1f1b", 4, 8)
    costs = priced(program, 1, 1, 1)
    figures = measure(program.schedule, costs, simulate(program, costs)).as_dict()
    assert json.loads(json.dumps(figures)) == figures
    assert figures["makespan"] == figures["longest"] == figures["lower_bound"] == 33
    assert figures["busy"] == [24] * 4
    assert figures["bubble"] == [9] * 4
    assert figures["peak_activations"] == [4, 3, 2, 1]
    assert figures["bubble_of_makespan"] == figures["bubble_of_longest"] == pytest.approx(9 / 33)
    assert figures["over_bound"] == 0
    told = (figures["schedule"], figures["ranks"], figures["stages"], figures["microbatches"])
    assert told == ("1f1b", 4, 4, 8)
    causes = figures["bubble_causes"]
    assert [sum(causes[c][r] for c in causes) for r in range(4)] == figures["bubble"]


def test_longest_is_shorter_than_the_makespan_where_no_rank_works_from_first_to_last():
    program = written(Placement.loop(2), 2, "0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    costs = Costs.of(Placement.loop(2), 1, 1, [1, 4])
    figures = measure(program.schedule, costs, simulate(program, costs))
    assert (figures.makespan, figures.longest, figures.lower_bound) == (13, 12, 13)
    assert figures.bubble.tolist() == [7, 1]
    assert figures.bubble_of_makespan == pytest.approx(8 / 26)
    assert figures.bubble_of_longest == 0


def test_latency_shows_as_distance_from_the_bound():
    program = built("1f1b", 4, 8)
    costs = priced(program, 10, 10, 10, latency=1)
    figures = measure(program.schedule, costs, simulate(program, costs))
    assert (figures.makespan, figures.lower_bound) == (330 + 16, 330 + 6)
    assert figures.over_bound == pytest.approx(10 / 336)


def test_the_peak_is_in_chunks_though_the_trace_counts_bytes():
    program = built("1f1b", 4, 8)
    costs = priced(program, 1, 1, 1)
    trace = simulate(program, costs, held(program.schedule, 1000))
    assert trace.held.max() == 4000
    assert measure(program.schedule, costs, trace).peak_activations.tolist() == [4, 3, 2, 1]


def test_rounding_puts_nothing_below_the_bound():
    for family in ("gpipe", "1f1b"):
        for m in range(4, 40, 5):
            program = built(family, 4, m)
            costs = priced(program, 0.1, 0.2, 0.7)
            found = measure(program.schedule, costs, simulate(program, costs))
            assert 0 <= found.over_bound < 1e-12


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
    same = found.trace.rank[1:] == found.trace.rank[:-1]
    assert (found.trace.start[1:] >= found.trace.start[:-1])[same].all()


def test_times_and_buckets_that_cannot_be_are_refused():
    program = built("1f1b", 2, 2)
    trace = timed(program, 1, 1, 1)
    with pytest.raises(ConfigError, match=r"each of the 2 stages, got \[1\]"):
        reduce_gradients(program, trace, [1])
    with pytest.raises(ConfigError, match=r"buckets must be .* got 0"):
        reduce_gradients(program, trace, [1, 1], 0)
