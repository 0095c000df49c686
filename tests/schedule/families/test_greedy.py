from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.families import build_schedule
from penstock.schedule.families.greedy import KINDS, Lists, Policy, Problem, construct, improve, score
from tests.support.schedule_oracle import timed


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    f, b, w = (np.array(draw(st.lists(st.integers(1, 9), min_size=p, max_size=p)), float) for _ in range(3))
    limit, kept = draw(st.integers(1, 2 * p)), draw(st.sampled_from([1.0, 0.5, 0.0]))
    return Problem(
        microbatches=m,
        forward=f,
        input_gradient=b,
        weight_gradient=w,
        latency=float(draw(st.integers(0, 3))),
        limit=float(limit),
        kept=kept,
    )


def policies(problem: Problem) -> st.SearchStrategy[Policy]:
    def column(values: st.SearchStrategy, kind: type) -> st.SearchStrategy:
        return st.lists(values, min_size=problem.ranks, max_size=problem.ranks).map(
            lambda x: np.array(x, kind)
        )

    return st.builds(
        Policy,
        column(st.integers(1, problem.max_ahead), np.int64),
        column(st.sampled_from([0.0, 0.5, 0.999]), np.float64),
        column(st.sampled_from([0.0, 0.5, 1.0, math.inf]), np.float64),
        column(st.booleans(), np.bool_),
    )


def complete(problem: Problem, lists: Lists) -> bool:
    """Whether each rank has every op, none before what it needs on its rank."""
    for row in lists:
        counts = [0, 0, 0]
        for kind in row:
            counts[kind] += 1
            if counts[1] > counts[0] or counts[2] > counts[1]:
                return False
        if counts != [problem.microbatches] * 3:
            return False
    return True


@given(problems(), st.data())
@settings(deadline=None, derandomize=True, max_examples=150)
def test_what_a_policy_constructs_is_complete_fits_and_is_timed_right(problem: Problem, data: st.DataObject):
    found, lists = construct(problem, data.draw(policies(problem)))
    if math.isinf(found[0]):
        return
    assert complete(problem, lists)
    assert problem.fits(lists)
    # Timed again every op starts as soon as it can, which cannot end later.
    again = score(problem, lists)
    assert again[1] <= found[1] + 1e-9
    assert again[0] >= problem.lower_bound[0] - 1e-9
    assert again[1] >= problem.lower_bound[1] - 1e-9


@given(problems(), st.sampled_from([0, 1]))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_improvement_never_makes_it_worse_and_keeps_the_memory(problem: Problem, first: int):
    p = problem.ranks
    one = np.ones(p, np.int64)
    start, lists = construct(problem, Policy(one, np.zeros(p), np.full(p, math.inf), np.zeros(p, np.bool_)))
    better = improve(problem, lists, first, start[1 - first], 300)
    assert complete(problem, better)
    assert problem.fits(better)
    ours = score(problem, better)
    assert ours[first] <= start[first]
    assert ours[1 - first] <= start[1 - first]


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_the_score_of_a_schedule_is_its_time(name: str):
    p, m = 3, 7
    schedule = build_schedule(name, p, m)
    lists = np.searchsorted(KINDS, schedule.kind.reshape(p, 3 * m)).astype(np.int8)
    problem = Problem(
        microbatches=m,
        forward=np.full(p, 4.0),
        input_gradient=np.full(p, 5.0),
        weight_gradient=np.full(p, 3.0),
        latency=2.0,
        limit=9.0,
        kept=1.0,
    )
    makespan, longest, _ = timed(schedule, 4, 5, 3, 2)
    assert score(problem, lists) == (longest, makespan)


def test_a_policy_that_waits_for_what_cannot_come_has_no_score():
    problem = Problem(
        microbatches=2,
        forward=np.ones(1),
        input_gradient=np.ones(1),
        weight_gradient=np.ones(1),
        latency=0.0,
        limit=2.0,
        kept=1.0,
    )
    never = Policy(np.array([2]), np.zeros(1), np.full(1, math.inf), np.ones(1, np.bool_))
    assert construct(problem, never)[0] == (math.inf, math.inf)
