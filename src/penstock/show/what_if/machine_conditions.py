"""The machine's part in the length of a step, as a trace shows it: the same for every simulated change of the step.

Ranks that share cores, caches or memory bandwidth slow each other down. A schedule that lets ranks wait less then makes
every op longer, and saves less time than a simulation with the present costs promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from penstock.schedule.ops import Kind
from penstock.schedule.program import Program
from penstock.show.units import is_measured
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.beside import time_beside
from penstock.trace.bubbles import bubbles
from penstock.trace.events import Activity, Trace

_OPS = tuple(Activity(kind) for kind in Kind)
_LEAST_OPS = 12
"""Fewest ops that say anything."""
_ROUNDS = 6
"""Simulations until the length of ops and the number of ranks that compute at the same time agree."""


@dataclass(frozen=True)
class Contention:
    """Length of ops as a function of the other ranks that compute meanwhile: 1 + slope × (others - usual)."""

    # Growth of an op's length with each rank that computes meanwhile, relative to its usual length; at
    # least 0.
    slope: float = 0.0
    usual: float = 0.0  # mean number of other ranks that computed during an op in the trace

    def factor(self, others: float) -> float:
        """Return the length of ops during which `others` ranks compute, over their length in the trace."""
        # Far from the usual company, the line must not fall to 0.
        return max(0.1, 1.0 + self.slope * (others - self.usual))


def contention_of(trace: Trace) -> Contention:
    """Return the slowdown in a measured trace: the line through lengths of ops over the ranks that computed meanwhile.

    Lengths are relative to the median of the same stage and kind of op. A trace with few ops, or ops that all had the same
    company, shows none.
    """
    work = trace.only(_OPS)
    if trace.info.get("source") != "measured" or trace.ranks < 2 or len(work) < _LEAST_OPS:
        return Contention()
    length = (work.end - work.start).astype(np.float64)
    others = others_beside(work)
    relative = np.ones(len(work))
    for stage, kind in np.unique(np.stack([work.stage, work.kind]), axis=1).T:
        same = (work.stage == stage) & (work.kind == kind)
        relative[same] = length[same] / max(float(np.median(length[same])), 1e-12)
    # Single ops that the system interrupted would turn the line.
    sound = (relative > 0.5) & (relative < 2.0) & (length > 0)
    usual = float(np.average(others, weights=np.maximum(length, 1e-12)))
    spread = others[sound] - others[sound].mean() if sound.any() else np.zeros(0)
    if sound.sum() < _LEAST_OPS or float(spread @ spread) < 1e-3 * sound.sum():
        return Contention(0.0, usual)
    slope = float(spread @ relative[sound]) / float(spread @ spread)
    return Contention(max(0.0, slope), usual)


def others_beside(work: Trace) -> npt.NDArray[np.float64]:
    """Return the mean number of other ranks that compute during each op, shape (ops,)."""
    length = (work.end - work.start).astype(np.float64)
    beside = time_beside(work, np.arange(len(work)), np.ones(len(work)))
    return np.where(length > 0, beside / np.maximum(length, 1e-12), 0.0)


@dataclass(frozen=True)
class Conditions:
    """Conditions of the machine, the same for every simulated change."""

    contention: Contention
    overhead: float  # time between two ops of a rank
    measured: bool  # the step ran

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Return the conditions that a trace shows."""
        return cls(contention_of(trace), _overhead(trace), is_measured(trace))

    def simulate(self, program: Program, costs: Costs) -> Trace:
        """Simulate a program with ops as long as the ranks that compute meanwhile make them."""
        costs = _scaled(costs, 1.0, self.overhead)
        trace = simulate(program, costs)
        if not self.contention.slope:
            return trace
        factor = 1.0
        for _ in range(_ROUNDS):
            company = others_beside(trace)
            length = trace.end - trace.start
            others = float(np.average(company, weights=length)) if length.any() else 0.0
            # Half of the change, because full changes may swing between two answers.
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
