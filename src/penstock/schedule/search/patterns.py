"""Rules for list scheduling from a few numbers: microbatch after microbatch in one shifted pattern.

All ops of microbatch n are due n periods after those of microbatch 0. A pattern has how fast microbatches pass the stages
forward and back, how long they wait where they turn, when a W is due, and how many microbatches enter together. List
scheduling fits the warm-up and the drain around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from penstock.schedule.search.dispatch import Rule
from penstock.schedule.search.order_problem import Floats, OrderProblem


@dataclass(frozen=True)
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
                float(np.exp(random.normal(0, 0.5))), float(np.exp(random.normal(0, 0.7))),
                float(random.choice([0.0, 0.0, 2 * random.random()])),
                float(random.choice([0.0, 3 * random.random(), p * random.random() / 2, 1e6])),
                int(random.choice([1, 1, p, p, int(random.integers(1, 2 * p + 1))])),
                float(random.choice([0.0, 0.5, random.random(), 1.0])),
                float(random.choice([1.0, 1.0, 1.0 + 0.3 * random.random()])),
                float(random.choice([0.0, 0.0, 0.5, 1.0, 2.0])), float(random.choice([0.0, 0.0, 0.5, 0.99])),
            )  # fmt: skip

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
