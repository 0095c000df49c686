"""Orders of torchgpipe's clock cycles (`clock_cycles` in torchgpipe/pipeline.py, torchgpipe 0.0.7)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator

from bench.conformance.orders import Cells, Project, counts, order_of

RANKS, MICROBATCHES = (1, 2, 3, 4), (1, 2, 4, 7)


def projects(quick: bool) -> Iterator[Project]:
    """Yield the clock cycles."""
    source = "rules"
    make = cycles
    if importlib.util.find_spec("torchgpipe") is not None:
        import torchgpipe
        from torchgpipe.pipeline import clock_cycles

        source, make = f"torchgpipe {torchgpipe.__version__}", clock_cycles
    cases = counts(RANKS, MICROBATCHES, quick=quick)
    orders = [order_of(p, m, v, slots(p, make(m, p)), rules=slots(p, cycles(m, p))) for p, m, v in cases]
    yield Project("torchgpipe clock cycles", source, orders)


def cycles(m: int, p: int) -> Iterator[list[tuple[int, int]]]:
    """Yield microbatch and stage of the forwards of every clock: a microbatch enters in each, and moves on by one stage."""
    for clock in range(m + p - 1):
        yield [(clock - s, s) for s in range(p) if 0 <= clock - s < m]


def slots(p: int, clocks: Iterable[list[tuple[int, int]]]) -> Cells:
    """Return forwards by clock, and then the backwards in the opposite order, in which autograd runs them."""
    clocks = list(clocks)
    ranks: Cells = [[] for _ in range(p)]
    for kind, order in (("F", clocks), ("B", clocks[::-1])):
        for tasks in order:
            of_stage = {s: j for j, s in tasks}
            for s in range(p):
                ranks[s].append(f"{s}{kind}{of_stage[s]}" if s in of_stage else "")
    return ranks
