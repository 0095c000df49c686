"""The best possible order, found and proved by a constraint solver: an oracle for small pipelines.

OR-Tools' CP-SAT places every op of every rank in time, and knows nothing of schedules. Ops of a rank do not overlap, data
dependencies and the latency between ranks are kept, a rank never exceeds its limit of activations (from the start of a
forward to the end of its weight half), and the makespan is minimized. Costs must be whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from penstock.schedule.ops import Kind
from penstock.schedule.schedule import Schedule
from penstock.simulate.bounds import bound_of
from penstock.simulate.costs import Costs
from penstock.trace.events import Trace


@dataclass(frozen=True)
class Optimum:
    """The result of the solver.

    Attributes:
        makespan: makespan of the best order found; at most that of the schedule it started from.
        proved: lower bound on the makespan of any order; equal to `makespan` if the search was completed.
    """

    makespan: int
    proved: int


def optimum(schedule: Schedule, costs: Costs, trace: Trace, limit: int, seconds: float = 60.0) -> Optimum:
    """Return the smallest makespan over all orders of a schedule's ops.

    Args:
        schedule: schedule that gives the ops (split backwards) and their ranks; one rank per stage.
        costs: costs, in whole numbers.
        trace: simulation of the schedule, from which the search starts.
        limit: largest number of activations of a rank, in chunks.
        seconds: seconds after which the search stops.
    """
    model = cp_model.CpModel()
    horizon = int(trace.end.max())
    transfer = costs.communication.transfer(schedule.stages)
    holder = [ranks[0] for ranks in schedule.placement.holders]
    start, end, busy = {}, {}, {rank: [] for rank in range(schedule.ranks)}
    for row in range(len(schedule)):
        op = schedule.op(row)
        spent = int(costs.seconds[op.stage, op.kind])
        begin = model.new_int_var(0, horizon - spent, str(op))
        start[op.stage, op.kind, op.microbatch], end[op.stage, op.kind, op.microbatch] = begin, begin + spent
        busy[holder[op.stage]].append(model.new_fixed_size_interval_var(begin, spent, str(op)))
        model.add_hint(begin, int(trace.start[row]))
    for intervals in busy.values():
        model.add_no_overlap(intervals)
    held = {rank: [] for rank in range(schedule.ranks)}
    last = schedule.stages - 1
    for j in range(schedule.microbatches):
        for s in range(last + 1):
            model.add(start[s, Kind.I, j] >= end[s, Kind.F, j])
            model.add(start[s, Kind.W, j] >= end[s, Kind.I, j])
            if s < last:
                travel = int(transfer[s, 0]) if holder[s] != holder[s + 1] else 0
                model.add(start[s + 1, Kind.F, j] >= end[s, Kind.F, j] + travel)
                model.add(start[s, Kind.I, j] >= end[s + 1, Kind.I, j] + travel)
            lives = model.new_int_var(0, horizon, "")
            born, dead = start[s, Kind.F, j], end[s, Kind.W, j]
            held[holder[s]].append(model.new_interval_var(born, lives, dead, ""))
        if j:
            # Microbatches are alike, so they may be numbered in the order in which they enter.
            model.add(start[0, Kind.F, j] >= start[0, Kind.F, j - 1])
    for intervals in held.values():
        model.add_cumulative(intervals, [1] * len(intervals), limit)
    makespan = model.new_int_var(int(np.ceil(bound_of(schedule, costs).makespan)), horizon, "makespan")
    model.add_max_equality(makespan, [end[s, Kind.W, j] for s, kind, j in end if kind == Kind.W])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Optimum(horizon, round(solver.best_objective_bound))
    return Optimum(round(solver.objective_value), round(solver.best_objective_bound))
