"""Shorthand for the simulator's tests."""

from __future__ import annotations

from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.simulate.costs import Communication, Costs, Link
from penstock.simulate.simulator import simulate
from penstock.trace.events import Trace
from tests.support import schedules


def written(placement: Placement, microbatches: int, *ranks: str) -> Program:
    """A checked program from one line of ops per rank."""
    return check(schedules.written(placement, microbatches, *ranks)).program


def built(family: str, ranks: int, microbatches: int, virtual_stages: int | None = None) -> Program:
    return check(build_schedule(family, ranks, microbatches, virtual_stages)).program


def priced(program: Program, f: float, b: float, w: float, latency: float = 0, **costs: object) -> Costs:
    """Costs of a rank and microbatch, with a latency on every message between ranks."""
    blocks = costs.pop("blocks", "none")
    talk = Communication(same_node=Link(latency), other_node=Link(latency), blocks=blocks)
    return Costs.of(program.schedule.placement, f, b, w, communication=talk, **costs)


def timed(program: Program, f: float, b: float, w: float, latency: float = 0, **costs: object) -> Trace:
    return simulate(program, priced(program, f, b, w, latency, **costs))


def timeline(trace: Trace, rank: int) -> str:
    """One rank's ops as ``op@start-end``."""
    rows = trace.rank_slices()[rank]
    return " ".join(
        f"{trace.stage[k]}{'FBIWR'[trace.kind[k]]}{trace.microbatch[k]}@{trace.start[k]}-{trace.end[k]}"
        for k in range(rows.start, rows.stop)
    )
