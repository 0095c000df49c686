"""The plan of a step: a simulation in which every op takes its usual time, which is its median in a trace.

The trace differs from its plan by ops that took longer than usual, ranks that waited for a core, and time between ops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.schedule import Columns, Schedule
from penstock.show.blocks import second_of_pair
from penstock.simulate.costs import Communication, Costs, Link, Table
from penstock.simulate.simulator import simulate
from penstock.trace.events import Activity, Trace
from penstock.trace.messages import message_delays

_OPS = tuple(Activity(kind) for kind in Kind)


class PlannedStep(NamedTuple):
    """A simulated step."""

    program: Program
    costs: Costs  # costs of ops and messages; for a plan, the medians by stage and kind
    trace: Trace  # `program` simulated with `costs`; for a plan, memory changes by the median of each op


def plan(trace: Trace) -> PlannedStep:
    """Simulate the step of a trace with its own costs."""
    work = trace.only(_OPS)
    program = check(_schedule(work)).program
    costs = costs_of(work)
    held = None if work.held is None else _held(work, work.held)
    planned = simulate(program, costs, held)
    info = {**planned.info, "held": trace.info.get("held", "bytes")} if held is not None else planned.info
    return PlannedStep(program, costs, Trace(**{**vars(planned), "info": info}))


def costs_of(work: Trace) -> Costs:
    """Return the costs of a trace's ops: medians, in the trace's unit of time.

    A full backward that never ran costs its two halves; a half that never ran costs half of the full one. An op that ran in
    fused pairs only costs half a pair. A message takes the median time from the end of the op that sent it to the start of
    an op that waited for it.
    """
    stages = int(work.stage.max(initial=0)) + 1
    spent = (work.end - work.start).astype(np.float64)
    alone = ~(work.paired | second_of_pair(work))
    table = np.full((stages, len(Kind)), np.nan)
    pairs = np.full(stages, np.nan)
    for stage in range(stages):
        mine = work.stage == stage
        for kind in Kind:
            same = mine & (work.kind == kind)
            if (same & alone).any():
                table[stage, kind] = np.median(spent[same & alone])
            elif same.any():
                table[stage, kind] = np.median(spent[same]) / 2
        if (mine & work.paired).any():
            pairs[stage] = np.median(spent[mine & work.paired])
    _fill(table)
    pair = None
    if not np.isnan(pairs).all():
        # The simulator refuses pairs that are shorter than one of their halves.
        longest_half = table.max()
        pair = np.where(np.isnan(pairs), 2 * longest_half, np.maximum(pairs, longest_half))
    # A trace does not say which ranks share a node; all are taken to, and the other link is never used.
    return Costs(table, pair, communication=Communication(same_node=Link(_latency(work)), other_node=Link()))


def _fill(table: Table) -> None:
    """Replace NaN, the cost of ops that did not run."""
    f, b, i, w, r = (table[:, kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R))
    for column, other in ((i, w), (w, i)):
        column[:] = np.where(np.isnan(column), np.where(np.isnan(other), b / 2, b - other), column)
    b[:] = np.where(np.isnan(b), i + w, b)
    r[:] = np.where(np.isnan(r), f, r)
    np.nan_to_num(table, copy=False)
    np.maximum(table, 0, out=table)


def _latency(work: Trace) -> float:
    delays = message_delays(work)
    return max(0.0, float(np.median(delays))) if len(delays) else 0.0


def _schedule(work: Trace) -> Schedule:
    stages, microbatches = int(work.stage.max(initial=-1)) + 1, int(work.microbatch.max(initial=-1)) + 1
    if stages > len(work) or microbatches > len(work):
        raise ScheduleError(
            f"the step is incomplete: {len(work)} ops of {stages} stages and {microbatches} microbatches"
        )
    slices = work.rank_slices()
    missing = [rank for rank, rows in enumerate(slices) if rows.start == rows.stop]
    if missing or not stages or not microbatches:
        raise ScheduleError(
            f"the step is incomplete: rank {missing[0]} has no events" if missing else "there are no ops"
        )
    holders = [tuple(np.unique(work.rank[work.stage == stage]).tolist()) for stage in range(stages)]
    columns = [Columns(work.stage[r], work.kind[r], work.microbatch[r], work.paired[r]) for r in slices]
    name = str(work.info.get("schedule", "schedule"))
    return Schedule.from_columns(name, Placement(work.ranks, tuple(holders)), microbatches, columns)


def _held(work: Trace, held: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the memory of every rank after each of its ops if each op changes it by its median, shape (ops,)."""
    total = np.zeros(len(work), np.int64)
    for rows in work.rank_slices():
        change = np.diff(held[rows], prepend=np.int64(0))
        usual: npt.NDArray[Any] = np.zeros(len(change))
        stage, kind = work.stage[rows], work.kind[rows]
        for cell in np.unique(np.stack([stage, kind]), axis=1).T:
            same = (stage == cell[0]) & (kind == cell[1])
            usual[same] = np.median(change[same])
        total[rows] = np.maximum(np.cumsum(usual), 0).astype(np.int64)
    return total
