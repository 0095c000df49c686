from __future__ import annotations

import json

import pytest

from penstock.schedule.memory import held
from penstock.schedule.placement import Placement
from penstock.simulate.costs import Costs
from penstock.simulate.metrics import measure
from penstock.simulate.simulator import simulate
from tests.support.simulated import built, priced, written


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
    assert (figures["schedule"], figures["ranks"], figures["stages"], figures["microbatches"]) == (
        "1f1b",
        4,
        4,
        8,
    )
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
        for m in range(4, 40):
            program = built(family, 4, m)
            costs = priced(program, 0.1, 0.2, 0.7)
            found = measure(program.schedule, costs, simulate(program, costs))
            assert 0 <= found.over_bound < 1e-12
