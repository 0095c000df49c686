"""Schedules of the catalogue from which a search for an order starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from penstock.base.errors import ScheduleError
from penstock.schedule.families.breadth_first import breadth_first
from penstock.schedule.families.controllable import v_half, v_min
from penstock.schedule.families.dualpipe import dualpipe, dualpipe_v
from penstock.schedule.families.gpipe import gpipe
from penstock.schedule.families.interleaved import interleaved_1f1b
from penstock.schedule.families.one_f_one_b import eager_1f1b, one_f_one_b
from penstock.schedule.families.slots import chimera, hanayo
from penstock.schedule.families.zb_auto import zb_auto
from penstock.schedule.families.zb_v import zb_v
from penstock.schedule.families.zero_bubble import interleaved_zb, zb_h1, zb_h2
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.search.order_problem import OrderProblem

Build = Callable[[int, int, int], Schedule]

STARTS: dict[str, Build] = {
    "gpipe": lambda p, m, v: gpipe(p, m),
    "1f1b": lambda p, m, v: one_f_one_b(p, m),
    "eager-1f1b": lambda p, m, v: eager_1f1b(p, m),
    "interleaved-1f1b": interleaved_1f1b,
    "breadth-first": breadth_first,
    "zb-h1": lambda p, m, v: zb_h1(p, m),
    "zb-h2": lambda p, m, v: zb_h2(p, m),
    "interleaved-zb": interleaved_zb,
    "zb-v": lambda p, m, v: zb_v(p, m),
    "v-half": lambda p, m, v: v_half(p, m),
    "v-min": lambda p, m, v: v_min(p, m),
    "dualpipe": lambda p, m, v: dualpipe(p, m),
    "dualpipe-v": lambda p, m, v: dualpipe_v(p, m),
    "chimera": lambda p, m, v: chimera(p, m),
    "hanayo": hanayo,
}
"""Families by name, as functions of ranks, microbatches and stages per rank; `zb_auto` is a search of its own."""


class CatalogueStarts:
    """All families of the catalogue, with the default options."""

    def schedules(self, problem: OrderProblem) -> Iterator[tuple[str, Schedule]]:
        """Yield name and schedule of every family with the placement of a problem, whatever its memory and backward."""
        p, m, v = problem.ranks, problem.microbatches, problem.stages // problem.ranks
        for name, build in STARTS.items():
            try:
                schedule = build(p, m, v)
            except ScheduleError:
                continue
            if schedule.placement == problem.placement:
                yield name, schedule

    def slow_schedule(self, problem: OrderProblem) -> Schedule | None:
        """Return the schedule of zb-auto for the costs of a problem, or None if that has another placement or memory."""
        if problem.backward != "split" or problem.placement != Placement.loop(problem.ranks):
            return None
        costs = tuple(tuple(problem.seconds[:, kind].tolist()) for kind in (Kind.F, Kind.I, Kind.W))
        latency = float(problem.travel.max(initial=0.0))
        limit = 2.0 * problem.ranks
        if problem.budget is not None:
            saved = np.broadcast_to(np.asarray(problem.budget.saved), (problem.stages,))
            limit = float((problem.limits // np.maximum(1, saved.max())).min())
        if limit < 1:
            return None
        return zb_auto(
            problem.ranks, problem.microbatches, costs=(costs[0], costs[1], costs[2]), latency=latency,
            memory_limit=min(limit, 4.0 * problem.ranks), objective="makespan",
        )  # fmt: skip
