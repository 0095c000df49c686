"""How large a schedule of given counts will be; one that cannot be held is refused before it is built."""

from __future__ import annotations

from penstock import host
from penstock.errors import ScheduleError

MOST_RANKS = 100_000
"""Loops over ranks are Python's; for more of them each takes minutes."""

MOST_OPS = 2**31 - 1
"""Rows of a schedule are numbered in int32."""

BYTES_PER_OP = 150
"""Of memory, built, proved and simulated; measured at 1.6 million ops (125 to 210)."""

BYTES_PER_RANK = 2_000
"""The same for what there is one of on each rank; measured at 100,000 ranks of two ops each (1,800)."""


def require_size(
    name: str, ranks: int, microbatches: int, virtual_stages: int, memory: int | None = None
) -> None:
    """Refuse counts whose schedule would not fit in memory.

    Args:
        name: of the family.
        ranks, microbatches, virtual_stages: its counts.
        memory: bytes there are; by default those of this machine or container. All that it has counts and not what is
            free, so that equal machines give equal answers.

    Raises:
        ScheduleError: there are too many; says what they would take.
    """
    if memory is None:
        here = host.memory()
        memory = here.total if here is not None else None
    ops = 2 * ranks * virtual_stages * microbatches  # a forward and a backward, if it is not split
    bytes_ = ops * BYTES_PER_OP + ranks * BYTES_PER_RANK
    asked = (
        f"{name} with ranks={ranks:,}, virtual_stages={virtual_stages:,} and microbatches={microbatches:,}"
    )
    if ranks > MOST_RANKS:
        raise ScheduleError(f"{asked} is too large: a schedule has at most {MOST_RANKS:,} ranks")
    if ops > MOST_OPS:
        raise ScheduleError(
            f"{asked} is too large: it has {ops:,} ops, and a schedule has at most {MOST_OPS:,}; take fewer microbatches"
        )
    if memory is not None and bytes_ > memory:
        raise ScheduleError(
            f"{asked} is too large: its {ops:,} ops take about {bytes_ / 1e9:,.0f} GB of memory, and there are "
            f"{memory / 1e9:,.0f} GB here; take fewer microbatches"
        )
