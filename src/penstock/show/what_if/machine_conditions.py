"""Conditions of the machine that a simulated change meets, as a trace shows them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from penstock.schedule.ops import Kind
from penstock.schedule.program import Program
from penstock.show.contention import Contention, contention_of, others_beside
from penstock.show.units import is_measured
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import bubbles
from penstock.trace.events import Trace

_ROUNDS = 6
"""Rounds in which the length of ops and the ranks beside them find each other."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of the machine, the same for every simulated change.

    Attributes:
        overhead: time between two ops of a rank.
        measured: True if the step ran.
    """

    contention: Contention
    overhead: float
    measured: bool

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Return the conditions that a trace shows."""
        return cls(contention_of(trace), _overhead(trace), is_measured(trace))

    def simulate(self, program: Program, costs: Costs) -> Trace:
        """Simulate a program with ops as long as they are beside the ranks that compute meanwhile."""
        costs = _scaled(costs, 1.0, self.overhead)
        trace = simulate(program, costs)
        if not self.contention.slope:
            return trace
        factor = 1.0
        for _ in range(_ROUNDS):
            company = others_beside(trace)
            length = trace.end - trace.start
            others = float(np.average(company, weights=length)) if length.any() else 0.0
            factor = (factor + self.contention.factor(others)) / 2
            trace = simulate(program, _scaled(costs, factor, 0.0))
        return trace


def _scaled(costs: Costs, factor: float, extra: float) -> Costs:
    if factor == 1.0 and not extra:
        return costs
    pair = None if costs.pair is None else costs.pair * factor + 2 * extra
    return replace(costs, seconds=costs.seconds * factor + extra, pair=pair)


def _overhead(trace: Trace) -> float:
    """Return the mean time that a rank of a measured trace spends between two ops although the second could begin."""
    if not is_measured(trace):
        return 0.0
    idle = bubbles(trace).idle.get("overhead")
    ops = int((trace.kind <= max(Kind)).sum())
    return float(idle.sum()) / ops if idle is not None and ops else 0.0
