from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ScheduleError
from penstock.schedule.families import build_schedule
from penstock.schedule.memory import Budget, held, peak
from penstock.schedule.ops import Kind, Op
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from tests.support.schedule_oracle import halves
from tests.support.schedules import schedules, written

ONE = Placement.loop(1)


def counted(schedule: Schedule, saved: list[int], waiting: list[int], freed_at: str) -> list[int]:
    """Held after every row, counted one op at a time in sets."""
    column = []
    for rank in range(schedule.ranks):
        kept: set[tuple[str, int, int]] = set()
        for op in schedule.ops(rank):
            for half in halves(op):
                s, j = half.stage, half.microbatch
                if half.kind == Kind.F:
                    kept.add(("saved", s, j))
                if half.kind == Kind.I:
                    kept.add(("waiting", s, j))
                if half.kind in (Kind.B, Kind.W) or (half.kind == Kind.I and freed_at == "B"):
                    kept.discard(("saved", s, j))
                if half.kind == Kind.W:
                    kept.discard(("waiting", s, j))
                column.append(sum(saved[s] if what == "saved" else waiting[s] for what, s, _ in kept))
    return column


@given(schedules(ranks=4, microbatches=6), st.data(), st.sampled_from(["B", "W"]))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_every_byte_is_held_from_its_op_to_the_op_that_frees_it(schedule, data, freed_at):
    sizes = st.lists(st.integers(0, 100), min_size=schedule.stages, max_size=schedule.stages)
    saved, waiting = data.draw(sizes), data.draw(sizes)
    column = held(schedule, saved, waiting, freed_at=freed_at)
    assert column.tolist() == counted(schedule, saved, waiting, freed_at)
    most = peak(schedule, saved, waiting, freed_at=freed_at)
    assert most.tolist() == [column[schedule.rows(r)].max() for r in range(schedule.ranks)]
    ends = [column[schedule.rows(r)][-1] for r in range(schedule.ranks)]
    assert ends == [0] * schedule.ranks


def test_a_recomputed_forward_keeps_its_input_only():
    schedule = written(ONE, 2, "0F0 0F1 0R0 0B0 0B1")
    assert held(schedule, 10, inputs=3).tolist() == [3, 13, 20, 10, 0]


def test_zb_h1_holds_p_activations_until_w_and_fewer_if_b_frees_them():
    schedule = build_schedule("zb-h1", 4, 8)
    assert peak(schedule).tolist() == [4, 4, 4, 4]
    assert peak(schedule, freed_at="B").tolist() == [4, 3, 2, 1]


def test_zb_h2_in_the_papers_accounting():
    saved, waiting, p = 1000, 300, 4
    schedule = build_schedule("zb-h2", p, 16)
    peaks = peak(schedule, saved, waiting, freed_at="B")
    assert peaks.tolist() == [(2 * p - 2 * r - 1) * saved + 2 * r * waiting for r in range(p)]


def test_a_rank_without_ops_holds_nothing():
    schedule = Schedule.from_ops("half", Placement.loop(3), 1, [[], [Op(1, Kind.F, 0)], []])
    assert peak(schedule).tolist() == [0, 1, 0]
    assert held(schedule).tolist() == [1]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (
            {"saved": [1, 2, 3]},
            "saved has shape (3,); give one number of bytes, or one for each of the 2 stages",
        ),
        ({"saved": -1}, "saved must be whole bytes of at least 0, got -1"),
        ({"waiting": 0.5}, "waiting must be whole bytes of at least 0, got 0.5"),
        ({"inputs": [[1]]}, "inputs has shape (1, 1)"),
    ],
)
def test_bytes_that_are_none_are_refused(bad: dict, says: str):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        held(build_schedule("1f1b", 2, 2), **bad)
    with pytest.raises(ScheduleError, match="limit has shape"):
        Budget([1, 2, 3]).limits(2)


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["B", "W"]))
@settings(deadline=None, derandomize=True, max_examples=25)
def test_no_order_holds_less_than_the_least_and_one_holds_no_more(data, stages, microbatches, freed_at):
    placement = Placement.loop(1, stages)
    sizes = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    split = data.draw(st.booleans())
    budget = Budget(0, data.draw(sizes), data.draw(sizes), freed_at=freed_at)
    chains = []
    for j in range(microbatches):
        forwards = [Op(s, Kind.F, j) for s in range(stages)]
        backwards = [Op(s, Kind.I if split else Kind.B, j) for s in reversed(range(stages))]
        chains.append(forwards + backwards)
    order: list[Op] = []
    late: list[Op] = []
    while any(chains) or late:
        choices = [n for n, chain in enumerate(chains) if chain] + [-1] * bool(late)
        n = data.draw(st.sampled_from(choices))
        op = late.pop(data.draw(st.integers(0, len(late) - 1))) if n < 0 else chains[n].pop(0)
        order.append(op)
        if op.kind == Kind.I:
            late.append(Op(op.stage, Kind.W, op.microbatch))
    least = budget.least(Schedule.from_ops("any", placement, microbatches, [order]))[0]
    assert budget.peak(Schedule.from_ops("any", placement, microbatches, [order]))[0] >= least
    alone = []
    for j in range(microbatches):
        alone += [Op(s, Kind.F, j) for s in range(stages)]
        for s in reversed(range(stages)):
            alone += [Op(s, Kind.I, j), Op(s, Kind.W, j)] if split else [Op(s, Kind.B, j)]
    assert budget.peak(Schedule.from_ops("alone", placement, microbatches, [alone]))[0] == least


def test_the_budget_counts_as_the_functions_do():
    schedule = build_schedule("zb-v", 3, 7)
    budget = Budget(5, 3, 2, freed_at="B")
    assert np.array_equal(budget.held(schedule), held(schedule, 3, 2, freed_at="B"))
    assert np.array_equal(budget.peak(schedule), peak(schedule, 3, 2, freed_at="B"))
    assert budget.limits(3).tolist() == [5, 5, 5]
