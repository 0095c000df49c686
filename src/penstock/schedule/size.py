"""Size of a schedule, checked before the schedule is built."""

from __future__ import annotations

from penstock.base import host
from penstock.base.errors import ScheduleError

MAX_RANKS = 100_000
"""Loops over ranks run in Python and would take minutes each for more."""

MAX_OPS = 2**31 - 1
"""Rows of a schedule are numbered in int32."""

BYTES_PER_OP = 150
"""Memory to build, prove and simulate one op; measured at 1.6 million ops (125 to 210)."""

BYTES_PER_RANK = 2_000
"""Memory besides for each rank; measured at 100,000 ranks of two ops each (1,800)."""


def require_size(
    name: str, ranks: int, microbatches: int, virtual_stages: int, memory: int | None = None
) -> None:
    """Raise `ScheduleError` if a schedule would not fit in so many bytes of memory.

    The default is all memory of the machine or container, free or not, so that equal machines give equal answers.
    """
    if memory is None:
        here = host.memory()
        memory = here.total if here is not None else None
    ops = 2 * ranks * virtual_stages * microbatches  # a forward and a backward, if it is not split
    bytes_ = ops * BYTES_PER_OP + ranks * BYTES_PER_RANK
    asked = (
        f"{name} with ranks={ranks:,}, virtual_stages={virtual_stages:,} and microbatches={microbatches:,}"
    )
    if ranks > MAX_RANKS:
        raise ScheduleError(f"{asked} is too large: a schedule has at most {MAX_RANKS:,} ranks")
    if ops > MAX_OPS:
        raise ScheduleError(
            f"{asked} is too large: it has {ops:,} ops, and a schedule has at most {MAX_OPS:,}; take fewer microbatches"
        )
    if memory is not None and bytes_ > memory:
        raise ScheduleError(
            f"{asked} is too large: its {ops:,} ops take about {bytes_ / 1e9:,.0f} GB of memory, and there are "
            f"{memory / 1e9:,.0f} GB here; take fewer microbatches"
        )
