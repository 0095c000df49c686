"""Search for a pattern that repeats, for steps of so many ops that moving single ones is hopeless.

A pattern is judged on a step with fewer microbatches, in which its warm-up, steady state and drain all appear, and
then varied. The best few are list scheduled on the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from time import perf_counter

import numpy as np

from penstock.schedule.search.dispatch import Dispatcher
from penstock.schedule.search.order_problem import Ints, OrderProblem
from penstock.schedule.search.patterns import Pattern, PatternMaker

DRAWN = 60
"""Patterns that are drawn before the best are varied."""
KEPT = 5
"""Best patterns; one is varied at a time, and in the end each makes an order of the whole step."""
ROUNDS = 4
"""Microbatches of the shorter step for each rank."""
CONSTRUCTIONS = 1_000
"""About how many orders a search builds: compiling pays off for that many."""
PATIENCE = 300
"""Variations without a better pattern after which the search ends."""


def repeating_orders(problem: OrderProblem, seconds: float, seed: int) -> Iterator[tuple[float, Ints]]:
    """Yield orders of the whole step with their makespans, of the best pattern first.

    Args:
        seconds: seconds after which patterns are not varied any more.
    """
    began = perf_counter()
    random = np.random.default_rng(seed)
    short = problem.shortened(min(problem.microbatches, ROUNDS * problem.ranks))
    maker, dispatcher = PatternMaker(short), Dispatcher(short, CONSTRUCTIONS)
    best: list[tuple[float, int, Pattern]] = []
    number, idle = 0, 0
    drawn = islice(maker.draw(random), DRAWN)
    while idle < PATIENCE and (number < KEPT or perf_counter() - began < seconds):
        pattern = next(drawn, None) or maker.vary(best[int(random.integers(len(best)))][2], random)
        makespan = dispatcher.build(maker.rule(pattern))[0]
        worst = best[-1][0] if len(best) == KEPT else np.inf
        known = any(pattern == other or makespan == length for length, _, other in best)
        idle += 1
        if makespan < worst and not known:
            idle = 0
            best = sorted([*best, (makespan, number, pattern)])[:KEPT]
        number += 1
    maker, dispatcher = PatternMaker(problem), Dispatcher(problem, CONSTRUCTIONS)
    for _, _, pattern in best:
        yield dispatcher.build(maker.rule(pattern))
