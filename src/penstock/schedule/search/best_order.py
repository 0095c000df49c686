"""Search for the order of a pipeline's ops with the shortest makespan in a given memory.

It begins with the schedules of the catalogue that fit, and with what list scheduling makes of some patterns. Each round then
anneals one of these, or the best order so far. The search ends when an order reaches the lower bound, when many rounds have
brought nothing, or when its time is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import Literal

import numpy as np

from penstock.schedule.schedule import Schedule
from penstock.schedule.search.annealing import Heat, anneal, time_order
from penstock.schedule.search.dispatch import Dispatcher
from penstock.schedule.search.order_problem import Ints, OrderProblem, joined
from penstock.schedule.search.patterns import PatternMaker, repeating_orders

Ended = Literal["proved", "converged", "time", "interrupted"]

PATTERNS = 40
"""Patterns that list scheduling makes into orders."""
LARGE = 3_000
"""Ops of a step beyond which the search looks for a pattern that repeats."""
STARTS = 8
"""Orders that are annealed in turn."""
PATIENCE = 1_200_000_000
"""Ops timed without a better order after which the search ends: about ten seconds."""
_WORK = 60_000_000
"""Ops that one round may time: about half a second."""
_COLD, _WARM = (0.3, 1.2), (0.15, 0.5)
"""Range of the first temperature, in mean seconds of an op: of a run from a start, and from the best order so far."""
_END, _PRICE, _DISTANCES = (0.03, 0.2), (0.6, 1.4), (5, 8, 12, 16)
"""Ranges of the last temperature and the price, in mean seconds of an op, and the largest distances of a move."""
_EXACT = 1e-9
"""Relative difference up to which two times differ by rounding alone."""


@dataclass(frozen=True, eq=False)
class FoundOrder:
    """Result of a search.

    Attributes:
        start: family or rule of the first order.
        ended: reason for the end: the lower bound is reached ("proved"), rounds brought nothing ("converged"), the time was
            over ("time"), or Ctrl-C ("interrupted").
    """

    codes: Ints
    makespan: float
    start: str
    rounds: int
    ended: Ended


@dataclass(frozen=True, eq=False)
class _Entry:
    """An order, with its makespan and the family or rule that it comes from."""

    makespan: float
    name: str
    codes: Ints


StartingPoints = Callable[[OrderProblem], Iterable[tuple[str, Schedule]]]
"""Function that yields schedules with the placement of a problem, and their names; those that do not fit are left out."""


class OrderSearch:
    """State of one search.

    Args:
        bound: makespan that no order can beat (default: `OrderProblem.least`).
        progress: function of the rounds so far and the best makespan, called after every round.
    """

    def __init__(
        self,
        problem: OrderProblem,
        starting: StartingPoints,
        *,
        bound: float = 0.0,
        seed: int = 0,
        progress: Callable[[int, float], None] | None = None,
    ) -> None:
        problem.require_possible()
        self.problem, self.bound, self.seed = problem, max(bound, problem.least), seed
        self._progress = progress
        self._starting = starting
        self._most = max(problem.counts)
        self._starts: list[_Entry] = []
        self._best: _Entry | None = None
        self._rounds = 0

    @property
    def best(self) -> FoundOrder:
        """The best order so far."""
        assert self._best is not None, "one microbatch after the other is always possible"
        return FoundOrder(self._best.codes, self._best.makespan, self._best.name, self._rounds, "time")

    def run(self, seconds: float, rounds: int | None = None) -> FoundOrder:
        """Search until its own end; Ctrl-C ends it with the best order so far."""
        began = perf_counter()
        ended: Ended = "interrupted"
        try:
            self._begin(seconds)
            ended = self._search(began, seconds, math.inf if rounds is None else rounds)
        except KeyboardInterrupt:
            if self._best is None:
                raise
        return replace(self.best, ended=ended)

    def _is_proved(self) -> bool:
        return self._best is not None and self._best.makespan <= self.bound * (1 + _EXACT)

    def _offer(self, name: str, makespan: float, codes: Ints) -> bool:
        """Keep an order if it is as good as the best; return whether it is better."""
        best = math.inf if self._best is None else self._best.makespan
        if makespan == math.inf or makespan > best * (1 + _EXACT):
            return False
        self._best = _Entry(makespan, name, codes)
        return makespan < best * (1 - _EXACT)

    def _add_start(self, name: str, makespan: float, codes: Ints) -> None:
        """Keep an order to begin with if it is among the best."""
        self._offer(name, makespan, codes)
        if self.problem.mixed and makespan < math.inf:
            codes = joined(self.problem, codes)
            makespan = self._makespan(codes)
            self._offer(name, makespan, codes)
        if makespan == math.inf or any(np.array_equal(codes, start.codes) for start in self._starts):
            return
        self._starts.append(_Entry(makespan, name, codes))
        self._starts.sort(key=lambda start: start.makespan)
        del self._starts[STARTS:]

    def _begin(self, seconds: float) -> None:
        problem = self.problem
        # Always possible, so there is a best order from here on, even after Ctrl-C.
        alone = problem.one_by_one()
        self._add_start("one by one", self._makespan(alone), alone)
        for name, schedule in self._starting(problem):
            self._add_schedule(name, schedule)
        if self._is_proved():
            return
        if len(alone) > LARGE:
            for makespan, codes in repeating_orders(problem, seconds / 2, self.seed):
                self._add_start("repeating pattern", makespan, codes)
            return
        maker, random = PatternMaker(problem), np.random.default_rng(self.seed)
        dispatcher = Dispatcher(problem, PATTERNS)
        for pattern in islice(maker.draw(random), PATTERNS):
            self._add_start("list scheduling", *dispatcher.build(maker.rule(pattern)))
            if self._is_proved():
                return

    def _add_schedule(self, name: str, schedule: Schedule) -> None:
        codes = self.problem.codes(schedule)
        if self.problem.allows(self.problem.schedule(codes, name)):
            self._add_start(name, self._makespan(codes), codes)

    def _makespan(self, codes: Ints) -> float:
        return time_order(self.problem.tables_of(codes), codes, self._most)[0]

    def _search(self, began: float, seconds: float, rounds: float) -> Ended:
        idle, longest = 0, 0.0
        while not self._is_proved():
            left = seconds - (perf_counter() - began)
            # A round begins if half of it fits, so the time is exceeded by half a round at most.
            if left <= longest / 2:
                return "time"
            if idle >= PATIENCE or self._rounds >= rounds:
                return "converged"
            at = perf_counter()
            better, work = self._anneal()
            idle = 0 if better else idle + work
            # The first round compiles.
            longest = max(longest, perf_counter() - at) if self._rounds > 1 else 0.0
            if self._progress is not None:
                self._progress(self._rounds, self.best.makespan)
        return "proved"

    def _anneal(self) -> tuple[bool, int]:
        """Anneal one order; return whether that found a better one than the best, and how many ops it timed."""
        number = self._rounds
        self._rounds += 1
        # Rounds alternate between a start in turn and the best order so far, which is heated less.
        turn, warm = divmod(number, 2)
        entry = self._best if warm else self._starts[turn % len(self._starts)]
        assert entry is not None, "one microbatch after the other is always possible"
        seconds, ops = self.problem.tables.seconds, len(entry.codes)
        unit = float(seconds[seconds > 0].mean()) if (seconds > 0).any() else 1.0
        moves = max(100, min((1000 + 100 * number) * ops, _WORK // ops))
        # From the round's number, so that a longer search begins with the rounds of a shorter one.
        random = np.random.default_rng((self.seed, number))
        start, end, price = (
            float(np.exp(random.uniform(math.log(low), math.log(high)))) * unit
            for low, high in (_WARM if warm else _COLD, _END, _PRICE)
        )
        distance, seed = int(random.choice(_DISTANCES)), int(random.integers(2**31))
        heat = Heat(moves, start, end, price, distance, seed, self.bound * (1 + _EXACT))
        makespan, codes = anneal(self.problem.tables_of(entry.codes), entry.codes, self._most, heat)
        better = self._offer(entry.name, makespan, codes)
        if self.problem.mixed and makespan < math.inf:
            codes = joined(self.problem, codes)
            better = self._offer(entry.name, self._makespan(codes), codes) or better
        return better, moves * ops
