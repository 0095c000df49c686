"""Search for a schedule with given costs and memory, with a certificate: how far at most it is from the best possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from penstock.schedule.check import check
from penstock.schedule.families.starts import catalogue_starts
from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.search.best_order import Ended, FoundOrder, OrderSearch
from penstock.schedule.search.order_problem import BackwardMode, OrderProblem, pipes_of
from penstock.simulate.bounds import bound_in_memory
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import bubbles, makespan
from penstock.trace.events import Trace

_EXACT = 1e-9
"""Relative difference up to which two times differ by rounding alone."""
SECONDS = 10.0
"""Time of a search, unless another is given."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CertifiedSchedule:
    """Result of a search."""

    schedule: Schedule
    trace: Trace
    makespan: Any  # in the costs' unit
    lower_bound: Any  # no schedule with this placement, these costs and this memory can beat it
    work: Any  # computing time of the busiest rank
    peak: Any  # int64, most activations, or bytes if the budget has sizes, on each rank, shape (ranks,)
    start: str  # family or rule from whose schedule the search began
    rounds: int
    ended: Ended  # see `FoundOrder`
    seconds: float

    @property
    def bubble(self) -> Any:
        """Makespan minus the work of the busiest rank."""
        return self.makespan - self.work

    @property
    def gap(self) -> float:
        """Share of the makespan's excess over the lower bound; 0 proves that no order is quicker."""
        return max(0.0, float(self.makespan) / float(self.lower_bound) - 1) if self.lower_bound else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as values that JSON can represent."""
        return {
            "makespan": np.asarray(self.makespan).item(),
            "bubble": np.asarray(self.bubble).item(),
            "lower_bound": np.asarray(self.lower_bound).item(),
            "gap": self.gap,
            "peak": int(self.peak.max()),
            "peaks": self.peak.tolist(),
            "seconds": self.seconds,
            "start": self.start,
            "rounds": self.rounds,
            "ended": self.ended,
        }


def search_schedule(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    backward: BackwardMode = "full",
    budget: Budget | None = None,
    *,
    seconds: float = SECONDS,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> CertifiedSchedule:
    """Search for the schedule with the shortest makespan.

    The result is never slower than a schedule of the catalogue with this placement that fits. For a seed it is always
    the same, unless its time ends the search. KeyboardInterrupt ends it with the best so far. `progress` is called
    with the rounds so far and the best makespan after every round.
    """
    began = perf_counter()
    problem = order_problem(placement, microbatches, costs, backward, budget)
    bound = bound_in_memory(placement, microbatches, costs, backward, budget)
    if costs.pair is None:  # the search counts the halves of pairs apart
        bound = max(bound, _rounded(problem.least_of_all, bound))
    found: FoundOrder | None = None
    for number, each in enumerate(problem.assignments):
        left = (seconds - (perf_counter() - began)) / (len(problem.assignments) - number)
        if found is not None and (
            found.ended == "interrupted" or _reaches(found.makespan, bound) or left <= 0
        ):
            break
        search = OrderSearch(each, catalogue_starts, bound=float(bound), seed=seed, progress=progress)
        best = search.run(max(left, 0.0))
        if found is None or best.makespan < found.makespan:
            found, problem = best, each
    assert found is not None, "there is an assignment"
    schedule, start = problem.schedule(found.codes, "searched"), found.start
    trace = simulate(check(schedule, budget=budget).program, costs)
    if costs.pair is not None:
        # Pairs that overlap their halves may be quicker than the same ops apart.
        for name, other in catalogue_starts(problem):
            if other.paired.any() and problem.allows(other):
                timed = simulate(check(other).program, costs)
                if makespan(timed) < makespan(trace):
                    schedule, trace, start = other, timed, name
    span = makespan(trace)
    # The search proves an order for its own division of the microbatches; `bound` holds for all divisions.
    ended: Ended = "converged" if found.ended == "proved" else found.ended
    ended = "proved" if _reaches(span, bound) else ended
    return CertifiedSchedule(
        schedule=schedule,
        trace=trace,
        makespan=span,
        lower_bound=min(bound, span),
        work=bubbles(trace).busy.max(),
        peak=(budget or Budget(0)).peak(schedule),
        start=start,
        rounds=found.rounds,
        ended=ended,
        seconds=perf_counter() - began,
    )


def _rounded(least: float, like: Any) -> Any:
    """Return a bound as a whole number if all times are whole; rounding errors do not raise it."""
    return int(np.ceil(least - _EXACT * least)) if isinstance(like, int) else least


def _reaches(span: Any, bound: Any) -> bool:
    return bool(span <= bound * (1 + _EXACT))


def order_problem(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    backward: BackwardMode,
    budget: Budget | None = None,
) -> OrderProblem:
    """Return the ops to order, with their costs."""
    costs.cover(placement.stages)
    communication = costs.communication
    transfer, node = communication.transfer(placement.stages), communication.node(placement.ranks)
    seconds = costs.seconds
    pipes = pipes_of(placement)
    travel = np.zeros((len(pipes), placement.stages - 1))
    for q, pipe in enumerate(pipes):
        for s, (a, b) in enumerate(pairwise(pipe)):
            travel[q, s] = 0 if a == b else transfer[s, int(node[a] != node[b])]
    return OrderProblem(
        placement=placement,
        microbatches=microbatches,
        backward=backward,
        seconds=seconds,
        travel=travel,
        budget=budget,
        sender_blocks=communication.blocks in ("sender", "both"),
        receiver_blocks=communication.blocks in ("receiver", "both"),
        mixed=backward == "split"
        and bool((seconds[:, Kind.B] < seconds[:, Kind.I] + seconds[:, Kind.W]).any()),
    )
