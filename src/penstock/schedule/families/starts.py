"""Schedules of the catalogue from which a search for an order starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.base.errors import ScheduleError
from penstock.schedule.families.controllable import v_half, v_min
from penstock.schedule.families.dualpipe import dualpipe, dualpipe_v
from penstock.schedule.families.full_backward import (
    breadth_first,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
)
from penstock.schedule.families.slots import chimera, hanayo
from penstock.schedule.families.zb_v import zb_v
from penstock.schedule.families.zero_bubble import interleaved_zb, zb_h1, zb_h2
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
"""Families by name, as functions of ranks, microbatches and stages per rank."""


def catalogue_starts(problem: OrderProblem) -> Iterator[tuple[str, Schedule]]:
    """Yield name and schedule of every family with the placement of a problem, whatever its memory and backward."""
    p, m, v = problem.ranks, problem.microbatches, problem.stages // problem.ranks
    for name, build in STARTS.items():
        try:
            schedule = build(p, m, v)
        except ScheduleError:
            continue
        if schedule.placement == problem.placement:
            yield name, schedule
