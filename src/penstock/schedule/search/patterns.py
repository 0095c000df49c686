"""Rules for list scheduling from a few numbers: microbatch after microbatch in one shifted pattern.

All ops of microbatch n are due n periods after the ops of microbatch 0. A pattern has how fast microbatches pass the stages
forward and back, how long they wait where they turn, when a W is due, and how many microbatches enter together. List
scheduling fits the warm-up and the drain around it.

`repeating_orders` searches for a pattern, for steps of so many ops that moving single ones is hopeless. A pattern is judged
on a step with fewer microbatches, in which its warm-up, steady state and drain all appear, and then varied. The best few
are list scheduled on the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np

from penstock.schedule.search.dispatch import Dispatcher, Rule
from penstock.schedule.search.order_problem import Floats, Ints, OrderProblem

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


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Numbers of a pattern.

    Attributes:
        down, up: time that a microbatch takes forward and back, as a part of the least.
        turn: periods between the last forward of a microbatch and its first backward.
        weight: periods from the gradient of a stage until its W is due.
        group: microbatches that enter together.
        spread: periods between the microbatches of a group.
        stretch: length of the period, as a part of the work that a microbatch brings to the busiest rank.
        patience, overrun: see `Rule`.
    """

    down: float = 1.0
    up: float = 1.0
    turn: float = 0.0
    # Due so late that a W only fills gaps.
    weight: float = 1e6
    group: int = 1
    spread: float = 1.0
    stretch: float = 1.0
    patience: float = 0.0
    overrun: float = 0.0


class PatternMaker:
    """Turns patterns of one problem into rules."""

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem

    @cached_property
    def period(self) -> float:
        """Seconds that a microbatch of every pipe brings to the busiest rank."""
        problem, tables = self.problem, self.problem.tables
        seconds = tables.seconds.reshape(-1, 4)[:, : problem.kinds].sum(axis=1)
        return float(np.bincount(problem.node_ranks, seconds, problem.ranks).max())

    @cached_property
    def paths(self) -> tuple[Floats, Floats]:
        """Earliest ends of the forward and of the gradient of each node's first microbatch."""
        problem, tables = self.problem, self.problem.tables
        seconds, lag = tables.seconds.reshape(-1, 4), tables.lag.reshape(-1, 4)
        forward, gradient = np.zeros(len(seconds)), np.zeros(len(seconds))
        for q in range(len(problem.pipes)):
            own = slice(q * problem.stages, (q + 1) * problem.stages)
            forward[own] = np.cumsum((seconds + lag)[own, 0])
            gradient[own] = forward[own][-1] + np.cumsum((seconds + lag)[own, 1][::-1])[::-1]
        return forward, gradient

    def rule(self, pattern: Pattern) -> Rule:
        """Return the rule of a pattern."""
        problem = self.problem
        period = self.period * pattern.stretch
        forward, gradient = self.paths
        pipe = np.arange(len(forward)) // problem.stages
        last = forward.reshape(-1, problem.stages)[:, -1][pipe]
        n = np.arange(max(problem.counts))
        entered = (n // pattern.group * pattern.group + n % pattern.group * pattern.spread) * period
        # Pipes take turns.
        entered = entered + pipe[:, None] * period / len(problem.pipes)
        turn = np.empty((len(forward), 3, len(n)))
        turn[:, 0] = entered + (forward * pattern.down)[:, None]
        gradient = last * pattern.down + (gradient - last) * pattern.up + pattern.turn * period
        turn[:, 1] = entered + gradient[:, None]
        turn[:, 2] = turn[:, 1] + pattern.weight * period
        return Rule(turn.reshape(-1, len(n)), pattern.patience, pattern.overrun)

    def draw(self, random: np.random.Generator) -> Iterator[Pattern]:
        """Yield patterns: the plain ones first, then random ones without end."""
        p = self.problem.ranks
        for group, spread in ((1, 1.0), (p, 0.5), (p, 0.25), (p, 0.0)):
            for weight in (1e6, 0.0):
                for patience in (0.0, 1.0):
                    yield Pattern(group=group, spread=spread, weight=weight, patience=patience)
        while True:
            yield Pattern(
                down=float(np.exp(random.normal(0, 0.5))),
                up=float(np.exp(random.normal(0, 0.7))),
                turn=float(random.choice([0.0, 0.0, 2 * random.random()])),
                weight=float(random.choice([0.0, 3 * random.random(), p * random.random() / 2, 1e6])),
                group=int(random.choice([1, 1, p, p, int(random.integers(1, 2 * p + 1))])),
                spread=float(random.choice([0.0, 0.5, random.random(), 1.0])),
                stretch=float(random.choice([1.0, 1.0, 1.0 + 0.3 * random.random()])),
                patience=float(random.choice([0.0, 0.0, 0.5, 1.0, 2.0])),
                overrun=float(random.choice([0.0, 0.0, 0.5, 0.99])),
            )

    def vary(self, pattern: Pattern, random: np.random.Generator) -> Pattern:
        """Return a pattern with a few of its numbers changed a little."""
        p = self.problem.ranks
        changes: dict[str, Any] = {
            "down": pattern.down * float(np.exp(random.normal(0, 0.1))),
            "up": pattern.up * float(np.exp(random.normal(0, 0.1))),
            "turn": max(0.0, pattern.turn + float(random.normal(0, 0.3))),
            "weight": float(
                random.choice([1e6, min(pattern.weight, p) * float(np.exp(random.normal(0, 0.3)))])
            ),
            "group": int(np.clip(pattern.group + random.integers(-2, 3), 1, 4 * p)),
            "spread": float(np.clip(pattern.spread + random.normal(0, 0.1), 0.0, 1.0)),
            "stretch": max(1.0, pattern.stretch + float(random.normal(0, 0.02))),
            "patience": float(random.choice([0.0, 0.5, 1.0, 2.0])),
            "overrun": float(random.choice([0.0, 0.5, 0.99])),
        }
        kept = {name: value for name, value in changes.items() if random.random() < 0.3}
        return replace(pattern, **kept)


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
