"""Search for the order of a pipeline's ops with the shortest makespan in a given memory.

It begins with the schedules of the catalogue that fit, and with what list scheduling makes of some patterns. Each round then
anneals one of these, or the best order so far. The search ends when an order reaches the lower bound, when many rounds have
brought nothing, or when its time is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import Literal

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.ops import Kind
from penstock.schedule.schedule import Schedule
from penstock.schedule.search.annealing import Heat, anneal, time_order
from penstock.schedule.search.dispatch import Dispatcher
from penstock.schedule.search.order_problem import Ints, OrderProblem
from penstock.schedule.search.patterns import PatternMaker
from penstock.schedule.search.starts import allowed, catalogue_schedules, zero_bubble_start

Ended = Literal["proved", "converged", "time", "interrupted"]

PATTERNS = 40
"""Patterns of which list scheduling makes an order."""
POOL = 8
"""Orders that are annealed in turn."""
PATIENCE = 30
"""Rounds without a better order after which the search ends."""
_WORK = 60_000_000
"""Ops that one round may time: about a second."""
_EXACT = 1e-9
"""Relative difference up to which two times differ by rounding alone."""


@dataclass(frozen=True, eq=False)
class FoundOrder:
    """Result of a search.

    Attributes:
        codes: the order.
        makespan: its makespan, in seconds.
        start: family or rule of the first order.
        rounds: number of rounds annealed.
        ended: reason for the end: the lower bound is reached ("proved"), rounds brought nothing ("converged"), the time was
            over ("time"), or Ctrl-C ("interrupted").
    """

    codes: Ints
    makespan: float
    start: str
    rounds: int
    ended: Ended


class OrderSearch:
    """State of one search.

    Args:
        problem: ops to order.
        bound: makespan that no order can beat (default 0: unknown).
        seed: seed of the random numbers (default 0).
        progress: function of the rounds so far and the best makespan, called after every round.
    """

    def __init__(
        self,
        problem: OrderProblem,
        *,
        bound: float = 0.0,
        seed: int = 0,
        progress: Callable[[int, float], None] | None = None,
    ) -> None:
        problem.require_possible()
        self.problem, self.bound, self.seed = problem, bound, seed
        self._progress = progress
        self._most = max(problem.counts)
        self._pool: list[tuple[float, int, str, Ints]] = []
        self._rounds = 0

    @property
    def best(self) -> FoundOrder:
        """The best order so far."""
        length, _, name, codes = self._pool[0]
        return FoundOrder(codes, length, name, self._rounds, "time")

    def run(self, seconds: float) -> FoundOrder:
        """Search until the end of its own, or for some seconds; Ctrl-C ends it with the best order so far."""
        began = perf_counter()
        ended: Ended = "interrupted"
        try:
            self._start()
            ended = self._search(began, seconds)
        except KeyboardInterrupt:
            if not self._pool:
                raise
        return replace(self.best, ended=ended)

    @property
    def _proved(self) -> bool:
        return bool(self._pool) and self._pool[0][0] <= self.bound * (1 + _EXACT)

    def _add(self, name: str, length: float, codes: Ints) -> bool:
        """Keep an order if it is among the best; return whether it is the best."""
        if length == math.inf or any(np.array_equal(codes, other) for *_, other in self._pool):
            return False
        better = not self._pool or length < self._pool[0][0] * (1 - _EXACT)
        self._pool.append((length, len(self._pool), name, codes))
        self._pool.sort(key=lambda entry: entry[0])
        del self._pool[POOL:]
        return better

    def _start(self) -> None:
        problem = self.problem
        alone = problem.one_by_one()
        self._add("one by one", time_order(problem.tables, alone, self._most)[0], alone)
        for name, schedule in catalogue_schedules(problem):
            self._add_schedule(name, schedule)
        if self._proved:
            return
        maker, random = PatternMaker(problem), np.random.default_rng(self.seed)
        dispatcher = Dispatcher(problem, PATTERNS)
        for pattern in islice(maker.draw(random), PATTERNS):
            self._add("list scheduling", *dispatcher.build(maker.rule(pattern)))

    def _add_schedule(self, name: str, schedule: Schedule) -> None:
        try:
            codes = self.problem.codes(schedule)
        except ScheduleError:
            return
        order = self.problem.schedule(codes, name)
        if allowed(self.problem, order):
            self._add(name, time_order(self.problem.tables, codes, self._most)[0], codes)

    def _search(self, began: float, seconds: float) -> Ended:
        since, longest = 0, 0.0
        while not self._proved:
            left = seconds - (perf_counter() - began)
            if left <= longest / 2:
                return "time"
            if since >= PATIENCE:
                return "converged"
            at = perf_counter()
            since = 0 if self._anneal() else since + 1
            longest = max(longest, perf_counter() - at) if self._rounds > 1 else 0.0
            if self._progress is not None:
                self._progress(self._rounds, self._pool[0][0])
        return "proved"

    def _anneal(self) -> bool:
        """Anneal one order of the pool; return whether that found a better one than the best."""
        number, ops = self._rounds, len(self._pool[0][3])
        self._rounds += 1
        seconds = self.problem.tables.seconds
        unit = float(seconds[seconds > 0].mean()) if (seconds > 0).any() else 1.0
        turn, kind = divmod(number, 2)
        warm = kind == 1
        _, _, name, codes = self._pool[0 if warm else turn % len(self._pool)]
        heat = Heat(
            moves=max(100, min(1000 * ops, _WORK // ops)),
            start=(0.2 if warm else 0.4) * unit,
            end=0.03 * unit,
            price=(1.0, 0.4)[turn % 2] * unit,
            distance=8,
            seed=self.seed * 100_003 + number,
            target=self.bound * (1 + _EXACT),
        )
        return self._add(name, *anneal(self.problem.tables, codes, self._most, heat))
