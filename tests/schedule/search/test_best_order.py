"""The search for orders: its problem and bounds, orders from patterns, and annealing."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from penstock.base.errors import ScheduleError
from penstock.schedule import jit
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES
from penstock.schedule.families.starts import STARTS, catalogue_starts
from penstock.schedule.memory import Budget, FreedAt
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.search.annealing import Heat, anneal, time_order
from penstock.schedule.search.best_order import OrderSearch
from penstock.schedule.search.dispatch import Dispatcher
from penstock.schedule.search.order_problem import WHOLE, BackwardMode, OrderProblem, joined, numbers
from penstock.schedule.search.patterns import PatternMaker, repeating_orders
from penstock.simulate.certified_search import order_problem
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan
from tests.support.lanes import exhaustive
from tests.support.orders import PLACEMENTS, small_problem, stage_costs


@pytest.mark.parametrize("blocks", ["none", "sender", "receiver", "both"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_an_order_takes_as_long_as_its_schedule_is_simulated_to_take(name: str, blocks: str):
    placement = PLACEMENTS[name]
    costs = stage_costs(placement, 3, 5, 2, latency=2, blocks=blocks)
    for backward in ("full", "split"):
        problem = small_problem(placement, 5, backward, costs=costs)
        codes = problem.one_by_one()
        schedule = problem.schedule(codes, "alone")
        trace = simulate(check(schedule).program, costs)
        timed = time_order(problem.tables, codes, max(problem.counts))[0]
        # A message that blocks its sender after the last op of all is not a part of the simulated makespan.
        assert timed == makespan(trace)


@pytest.mark.parametrize("family", STARTS)
def test_a_family_keeps_its_order(family: str):
    schedule = FAMILIES[family].build(4, 6)
    costs = stage_costs(schedule.placement, 3, 5, 2, latency=1)
    backward = "split" if FAMILIES[family].splits_backward else "full"
    problem = order_problem(schedule.placement, 6, costs, backward)
    again = problem.schedule(problem.codes(schedule), family)
    if not schedule.paired.any() and not schedule.placement.has_copies:
        assert again == schedule
    took = makespan(simulate(check(again).program, costs))
    assert took <= makespan(simulate(check(schedule).program, costs))
    assert (Budget(0).peak(again) <= Budget(0).peak(schedule)).all()


def test_all_families_with_stages_on_one_rank_or_two_are_starts_but_the_searches():
    assert {n for n, family in FAMILIES.items() if not family.searches and not family.on_all_ranks} == set(
        STARTS
    )


def test_halves_that_follow_each_other_become_one_backward():
    problem = order_problem(Placement.loop(2), 3, stage_costs(Placement.loop(2), 3, 4, 3, full=5), "split")
    assert problem.mixed
    codes = joined(problem, problem.one_by_one())
    assert np.count_nonzero(codes % 4 == WHOLE) == 6
    schedule = problem.schedule(codes, "joined")
    assert schedule.text(0) == "0F0 0B0 0F1 0B1 0F2 0B2"
    assert problem.codes(schedule).tolist() == codes.tolist()
    check(schedule)


def test_a_weight_half_counts_past_whole_backwards():
    # F0 F1 F2, B0, I1, F3, B... W1: the W is of microbatch 1, which the B before it has left to it.
    codes = np.array([0, 0, 3, 1, 2, 0, 1, 2])
    assert numbers(codes).tolist() == [0, 1, 0, 1, 1, 2, 2, 2]


LEAST = {"loop": 1, "loop of 2": 2, "v": 2, "two pipes": 1}


@pytest.mark.parametrize(("name", "least"), LEAST.items())
def test_a_limit_below_one_microbatch_is_refused_with_the_least(name: str, least: int):
    small_problem(PLACEMENTS[name], 3, limit=least).require_possible()
    with pytest.raises(ScheduleError, match=f"takes {least} on rank 0, so {least} is the least"):
        small_problem(PLACEMENTS[name], 3, limit=least - 1).require_possible()


def test_copies_other_than_two_opposite_pipes_are_refused():
    copies = Placement(2, ((0, 1), (1,)))
    with pytest.raises(ScheduleError, match="two pipes in opposite directions"):
        order_problem(copies, 2, stage_costs(copies, 1, 1, 1), "full")


def test_the_pipes_share_the_microbatches():
    for microbatches, counts in ((5, (3, 2)), (6, (3, 3))):
        assert small_problem(Placement.two_way(4), microbatches).counts == counts


def test_only_two_pipes_that_differ_have_several_assignments():
    for placement, travel, several in (
        (Placement.loop(2), [[3.0]], False),
        (Placement.two_way(2), [[3.0], [3.0]], False),
        (Placement.two_way(2), [[3.0], [4.0]], True),
    ):
        problem = OrderProblem(
            placement=placement,
            microbatches=5,
            backward="full",
            seconds=np.ones((2, len(Kind))),
            travel=np.array(travel),
        )
        counts = [assigned.counts for assigned in problem.assignments]
        assert (len(counts) > 1) == several
        assert problem.counts in counts


@pytest.mark.parametrize("backward", ["full", "split"])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_two_pipes_is_the_least_of_all_assignments(backward: BackwardMode, seed: int):
    random = np.random.default_rng(seed)
    for microbatches in (1, 2, 3, 8, 13):
        placement = Placement.two_way(4)
        seconds = random.integers(1, 9, (4, len(Kind))).astype(float)
        travel = random.integers(0, 20, (2, 3)) * random.integers(0, 2, (2, 3)).astype(float)
        problem = OrderProblem(
            placement=placement, microbatches=microbatches, backward=backward, seconds=seconds, travel=travel,
            mixed=bool(seed % 2) and backward == "split",
        )  # fmt: skip
        each = [replace(problem, in_first=first).least for first in range(microbatches + 1)]
        assert problem.least_of_all == min(each)
        for assigned in problem.assignments:
            assert sum(assigned.counts) == microbatches
            alone = assigned.one_by_one()
            took = time_order(assigned.tables_of(alone), alone, max(assigned.counts))[0]
            assert assigned.least <= took + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["split", *exhaustive("full")])
@pytest.mark.parametrize("name", ["v", "two pipes", *exhaustive("loop", "loop of 2")])
def test_no_pattern_is_ever_stuck_however_small_the_memory(name: str, backward: str):
    for limit in (LEAST[name], LEAST[name] + 1, LEAST[name] + 3):
        problem = small_problem(PLACEMENTS[name], 6, backward, limit)
        dispatcher, maker = Dispatcher(problem, 1), PatternMaker(problem)
        for pattern in islice(maker.draw(np.random.default_rng(limit)), 30):
            makespan, codes = dispatcher.build(maker.rule(pattern))
            schedule = problem.schedule(codes, "dispatched")
            check(schedule, budget=Budget(limit))
            # The rank may have waited where the order alone would not.
            assert time_order(problem.tables, codes, max(problem.counts))[0] <= makespan < np.inf


@pytest.mark.parametrize("backward", ["full", "split"])
def test_two_pipes_with_memory_for_one_microbatch_take_turns(backward: str):
    problem = small_problem(PLACEMENTS["two pipes"], 6, backward, 1)
    dispatcher, maker = Dispatcher(problem, 1), PatternMaker(problem)
    for pattern in islice(maker.draw(np.random.default_rng(1)), 2):
        makespan, codes = dispatcher.build(maker.rule(pattern))
        assert makespan < np.inf
        check(problem.schedule(codes, "dispatched"), budget=Budget(1))


@pytest.mark.slow
@pytest.mark.parametrize("freed_at", ["B", *exhaustive("W")])
@pytest.mark.parametrize("name", ["v", *exhaustive("two pipes", "loop", "loop of 2")])
def test_gradients_that_wait_for_their_weight_halves_keep_the_limit(name: str, freed_at: FreedAt):
    placement, random = PLACEMENTS[name], np.random.default_rng(3)
    for _ in range(12):
        saved, waiting = (random.integers(low, 30, placement.stages) for low in (1, 0))
        budget = Budget(2**40, saved, waiting, freed_at=freed_at)
        free = order_problem(placement, 6, stage_costs(placement, 3, 4, 2, latency=1), "split", budget)
        least = budget.least(free.schedule(free.one_by_one(), "one by one"))
        problem = replace(free, budget=replace(budget, limit=least + random.integers(0, 20, placement.ranks)))
        dispatcher, maker = Dispatcher(problem, 1), PatternMaker(problem)
        for pattern in islice(maker.draw(random), 10):
            makespan, codes = dispatcher.build(maker.rule(pattern))
            assert makespan < np.inf
            check(problem.schedule(codes, "dispatched"), budget=problem.budget)


def test_a_pattern_with_room_is_1f1b():
    problem = small_problem(PLACEMENTS["loop"], 8, "full", 3)
    maker = PatternMaker(problem)
    _, codes = Dispatcher(problem, 1).build(maker.rule(next(maker.draw(np.random.default_rng(0)))))
    assert problem.schedule(codes, "dispatched").text(2).startswith("2F0 2B0 2F1 2B1 2F2 2B2")


def test_patterns_differ_and_vary():
    problem = small_problem(PLACEMENTS["v"], 6)
    maker, random = PatternMaker(problem), np.random.default_rng(1)
    drawn = list(islice(maker.draw(random), 40))
    assert len(set(drawn)) == 40
    assert len({maker.vary(drawn[20], random) for _ in range(20)}) > 10


@pytest.mark.parametrize("backward", ["full", "split"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_annealing_returns_a_valid_order_in_the_memory_with_its_makespan(name: str, backward: str):
    problem = small_problem(PLACEMENTS[name], 6, backward, 4)
    most, alone = max(problem.counts), problem.one_by_one()
    for seed in range(3):
        makespan, codes = anneal(problem.tables, alone, most, Heat(20_000, 2.0, 0.1, 3.0, 8, seed, 0.0))
        check(problem.schedule(codes, "annealed"), budget=Budget(4))
        assert time_order(problem.tables, codes, most)[0] == makespan
        assert makespan < time_order(problem.tables, alone, most)[0]


@pytest.mark.filterwarnings("ignore:.*without numba")
def test_annealing_without_numba_gives_the_same_order(monkeypatch: pytest.MonkeyPatch):
    problem = small_problem(PLACEMENTS["v"], 6, "split", 4)
    most, alone = max(problem.counts), problem.one_by_one()
    heat = Heat(1_000, 2.0, 0.1, 3.0, 8, 3, 0.0)
    compiled = anneal(problem.tables, alone, most, heat)
    monkeypatch.setattr(jit, "find_spec", lambda name: None)
    plain = anneal(problem.tables, alone, most, heat)  # an overflow in numpy would be an error
    assert plain[0] == compiled[0]
    assert plain[1].tolist() == compiled[1].tolist()


def test_annealing_may_begin_beyond_the_memory():
    loose = small_problem(PLACEMENTS["v"], 6, "split", 12)
    tight = small_problem(PLACEMENTS["v"], 6, "split", 4)
    wide = OrderSearch(loose, catalogue_starts).run(0.1).codes
    makespan, codes = anneal(tight.tables, wide, 6, Heat(100_000, 2.0, 0.1, 3.0, 8, 0, 0.0))
    assert makespan < np.inf
    check(tight.schedule(codes, "annealed"), budget=Budget(4))


def test_a_search_ends_at_the_bound():
    problem = small_problem(Placement.loop(3), 6, "full", 3)
    first = OrderSearch(problem, catalogue_starts).run(0.2)
    found = OrderSearch(problem, catalogue_starts, bound=first.makespan).run(60)
    assert (found.ended, found.makespan) == ("proved", first.makespan)


def test_of_orders_that_take_equally_long_the_last_is_kept():
    """Annealing walks on from it, also where many orders take equally long."""
    schedule = FAMILIES["1f1b"].build(3, 6)
    problem = order_problem(schedule.placement, 6, stage_costs(schedule.placement, 1, 2, 0), "full")
    slower = problem.schedule(problem.one_by_one(), "slower")
    given = [("first", schedule), ("second", schedule), ("slower", slower)]
    found = OrderSearch(problem, lambda _: given).run(60)
    assert (found.ended, found.start) == ("proved", "second")


def test_control_c_returns_the_best_so_far():
    problem = small_problem(PLACEMENTS["v"], 6, "split", 4)

    def interrupt(rounds: int, makespan: float) -> None:
        if rounds == 2:
            raise KeyboardInterrupt

    found = OrderSearch(problem, catalogue_starts, progress=interrupt).run(60)
    assert (found.ended, found.rounds) == ("interrupted", 2)
    check(problem.schedule(found.codes, "interrupted"), budget=Budget(4))


@pytest.mark.slow
def test_patterns_repeat_to_any_number_of_microbatches():
    problem = small_problem(PLACEMENTS["v"], 60, "split", 4)
    alone = time_order(problem.tables, problem.one_by_one(), 60)[0]
    orders = list(repeating_orders(problem, 0.5, 0))
    assert orders
    for took, codes in orders:
        check(problem.schedule(codes, "repeating"), budget=Budget(4))
        assert took < 0.7 * alone
