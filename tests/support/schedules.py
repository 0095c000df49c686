"""Shorthand for the tests of schedules."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.schedule.families import FAMILIES, Family, build_schedule
from penstock.schedule.ops import parse_op
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule


def written(placement: Placement, microbatches: int, *ranks: str) -> Schedule:
    """A schedule from one line of ops per rank."""
    ops = [[parse_op(op) for op in line.split()] for line in ranks]
    return Schedule.from_ops("written", placement, microbatches, ops)


def allows(family: Family, ranks: int, virtual_stages: int) -> bool:
    """Whether a family takes these counts; it takes any number of microbatches."""
    if family.name in ("dualpipe", "chimera") and ranks % 2:
        return False
    if family.name == "hanayo" and virtual_stages % 2:
        return False
    return family.chooses_virtual_stages or virtual_stages == family.virtual_stages


@st.composite
def schedules(draw: st.DrawFn, ranks: int = 8, microbatches: int = 16, virtual_stages: int = 4) -> Schedule:
    """Any family with any counts it allows, up to those given."""
    family = FAMILIES[
        draw(st.sampled_from([name for name, family in FAMILIES.items() if not family.searches]))
    ]
    v = draw(st.integers(1, virtual_stages)) if family.chooses_virtual_stages else family.virtual_stages
    if family.name == "hanayo":
        v += v % 2
    p = draw(st.integers(1, ranks))
    if family.name in ("dualpipe", "chimera"):
        p = 2 * max(1, p // 2)
    return build_schedule(family.name, p, draw(st.integers(1, microbatches)), v)
