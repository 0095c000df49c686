"""Ranks that slow each other down are seen in a trace, and advice does not promise what they take back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.schedule.ops import Kind
from penstock.show.analysis import advise
from penstock.show.planned import plan
from penstock.show.what_if.alternatives import SPLIT_COST
from penstock.show.what_if.machine_conditions import contention_of, others_beside
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.events import Activity, Trace

OPS = tuple(Activity(kind) for kind in Kind)


def contended(name: str, ranks: int, microbatches: int, slope: float) -> Trace:
    """Return a step in which each op takes 1 + slope × the other ranks that compute beside it."""
    program = check(build_schedule(name, ranks, microbatches)).program
    schedule = program.schedule
    lengths = {Kind.B: 2.0, Kind.I: SPLIT_COST, Kind.W: SPLIT_COST}
    if bool((schedule.kind == Kind.W).any()):
        lengths[Kind.F] = SPLIT_COST
    length = {(s, k): lengths.get(k, 1.0) for s in range(schedule.stages) for k in Kind}
    usual = np.array(
        [length[int(s), Kind(int(k))] for s, k in zip(schedule.stage, schedule.kind, strict=True)]
    )
    rows = [schedule.rows(rank) for rank in range(ranks)]
    position, left = [r.start for r in rows], usual.copy()
    start, end = np.full(len(schedule), -1.0), np.full(len(schedule), -1.0)
    clock = 0.0
    while any(position[r] < rows[r].stop for r in range(ranks)):
        running = []
        for rank in range(ranks):
            row = position[rank]
            source = -1 if row >= rows[rank].stop else int(program.source[row])
            if row < rows[rank].stop and (source < 0 or 0 <= end[source] <= clock):
                running.append(rank)
                start[row] = clock if start[row] < 0 else start[row]
        rate = 1 / (1 + slope * (len(running) - 1))
        step = min(left[position[rank]] for rank in running) / rate
        clock += step
        for rank in running:
            left[position[rank]] -= step * rate
            if left[position[rank]] < 1e-9:
                end[position[rank]] = clock
                position[rank] += 1
    trace = simulate(program, Costs.of(schedule.placement, 1, 1, 1))
    return replace(trace, start=start, end=end, info={**trace.info, "source": "measured"})


@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_the_slope_is_found(slope: float):
    found = contention_of(contended("gpipe", 2, 6, slope))
    assert found.slope == pytest.approx(slope, abs=0.25 * slope + 1e-9)
    assert 0 < found.usual < 1


def test_others_beside_counts_ranks_and_a_simulation_has_no_contention():
    trace = contended("gpipe", 3, 4, 0.0)
    others = others_beside(trace.only(OPS))
    assert others.min() == 0
    assert others.max() == pytest.approx(2)
    trace = contended("gpipe", 2, 6, 0.3)
    assert contention_of(replace(trace, info={**trace.info, "source": "simulated"})).slope == 0


@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_the_promised_gain_is_what_the_machine_gives(slope: float):
    now, then = (contended(name, 2, 6, slope) for name in ("gpipe", "zb-h1"))
    advice = advise(now, plan(now))
    change = next(change for change in advice.changes if change.schedule == "zb-h1")
    promised = 1 - change.makespan / advice.changes[0].makespan
    given = 1 - float(then.end.max()) / float(now.end.max())
    assert promised == pytest.approx(given, abs=0.02)
