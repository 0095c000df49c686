"""Small pipelines whose best order is proved, with the bubble that it leaves.

A makespan was proved by OR-Tools' CP-SAT (9.15), which places every op in time: ops of a rank do not overlap, data
dependencies and latencies are kept, and activations that a rank holds, each from the start of its forward to the end of its
backward (or W), never exceed the limit. `proved_by_solver` repeats a proof; most take seconds, the longest minutes.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.schedule.memory import Budget
from penstock.schedule.placement import Placement
from penstock.schedule.search.order_problem import BackwardMode
from penstock.simulate.costs import Communication, Costs, Link

Cost = int | tuple[int, ...]


class Proved(NamedTuple):
    """A pipeline and its least makespan.

    Attributes:
        placement: "loop", "v" or "bidirectional".
        p, m, v: ranks, microbatches, stages per rank.
        backward: kind of backward.
        costs: F, I and W of a stage, each one number or one per stage.
        latency: seconds a message takes.
        limit: activations a rank may hold.
        makespan: least makespan.
    """

    placement: str
    p: int
    m: int
    v: int
    backward: BackwardMode
    costs: tuple[Cost, Cost, Cost]
    latency: int
    limit: int
    makespan: int

    @property
    def placed(self) -> Placement:
        if self.placement == "loop":
            return Placement.loop(self.p, self.v)
        return Placement.waves(self.p, self.v) if self.placement == "v" else Placement.two_way(self.p)

    @property
    def table(self) -> Costs:
        """Costs of the stages."""
        stages = self.placed.stages
        f, b, w = ([cost] * stages if isinstance(cost, int) else list(cost) for cost in self.costs)
        link = Link(self.latency)
        return Costs.of(self.placed, f, b, w, communication=Communication(same_node=link))

    @property
    def budget(self) -> Budget:
        return Budget(self.limit)

    @property
    def name(self) -> str:
        f, b, w = ("/".join(map(str, c)) if isinstance(c, tuple) else str(c) for c in self.costs)
        return (
            f"{self.placement} p={self.p} m={self.m} v={self.v} {self.backward} {f},{b},{w} c={self.latency} "
            f"k={self.limit}"
        )


UNEVEN = ((3, 2, 2, 4), (3, 2, 2, 5), (2, 2, 2, 4))
HEADS = ((3, 2, 2, 2, 2, 4), (3, 2, 2, 2, 2, 5), (2, 2, 2, 2, 2, 4))
PROVED = (
    Proved("loop", 4, 6, 2, "full", (1, 1, 1), 0, 8, 45),
    Proved("loop", 4, 8, 2, "full", (1, 1, 1), 0, 8, 57),
    Proved("loop", 4, 10, 2, "full", (1, 1, 1), 0, 8, 69),
    Proved("loop", 4, 8, 2, "full", (1, 1, 1), 0, 7, 60),
    Proved("loop", 4, 8, 2, "full", (1, 1, 1), 0, 6, 65),
    Proved("loop", 8, 16, 2, "full", (1, 1, 1), 0, 16, 117),
    Proved("loop", 4, 8, 2, "full", (10, 10, 10), 3, 9, 614),
    Proved("loop", 3, 6, 3, "full", (1, 1, 1), 0, 8, 63),
    Proved("loop", 4, 12, 1, "full", (10, 10, 10), 1, 5, 456),
    Proved("loop", 4, 12, 1, "full", (10, 10, 10), 3, 4, 516),
    Proved("loop", 4, 8, 1, "full", (10, 12, 8), 5, 5, 370),
    Proved("loop", 8, 10, 1, "full", (1, 1, 1), 0, 6, 57),
    Proved("loop", 4, 8, 2, "split", (2, 2, 1), 0, 6, 95),
    Proved("loop", 4, 8, 1, "split", (3, 4, 2), 1, 4, 99),
    Proved("loop", 4, 8, 1, "split", (3, 4, 2), 0, 3, 101),
    Proved("loop", 4, 8, 1, "split", (3, 4, 2), 0, 2, 133),
    Proved("loop", 4, 8, 1, "split", (5, 4, 3), 2, 5, 126),
    Proved("loop", 4, 8, 1, "split", UNEVEN, 0, 4, 111),
    Proved("loop", 8, 24, 1, "split", (3, 4, 2), 1, 6, 333),
    Proved("v", 4, 8, 2, "split", (3, 4, 2), 0, 4, 200),
    Proved("v", 4, 8, 2, "split", (3, 4, 2), 0, 6, 169),
    Proved("v", 4, 8, 2, "split", (1, 1, 1), 0, 4, 59),
    Proved("v", 3, 6, 2, "split", HEADS, 1, 5, 129),
    Proved("v", 4, 8, 2, "full", (1, 1, 1), 0, 6, 63),
    Proved("v", 4, 8, 2, "full", (1, 1, 1), 0, 4, 83),
    Proved("v", 6, 12, 2, "full", (1, 1, 1), 1, 8, 141),
    Proved("bidirectional", 4, 8, 1, "split", (1, 1, 1), 0, 3, 27),
    Proved("bidirectional", 4, 8, 1, "split", (1, 1, 1), 0, 2, 32),
    Proved("bidirectional", 4, 8, 1, "split", (3, 3, 2), 0, 4, 67),
    Proved("bidirectional", 4, 8, 1, "full", (1, 1, 1), 0, 3, 32),
    Proved("bidirectional", 4, 8, 1, "full", (2, 2, 1), 1, 4, 53),
)
