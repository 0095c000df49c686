"""Problems of the search for orders, with whole costs of a stage."""

from __future__ import annotations

from penstock.schedule.memory import Budget
from penstock.schedule.placement import Placement
from penstock.schedule.search.order_problem import BackwardMode, OrderProblem
from penstock.simulate.certified_search import order_problem
from penstock.simulate.costs import Blocks, Communication, Costs, Link

PLACEMENTS = {
    "loop": Placement.loop(3),
    "loop of 2": Placement.loop(3, 2),
    "v": Placement.waves(3),
    "two pipes": Placement.two_way(4),
}


def stage_costs(
    placement: Placement, f: int, b: int, w: int, *, latency: int = 0, blocks: Blocks = "none", full: int | None = None
) -> Costs:  # fmt: skip
    """Costs of a stage's ops; later stages take one second longer, so that no two are alike."""
    each = range(placement.stages)
    link = Link(latency)
    return Costs.of(
        placement, [f + s for s in each], [b + s for s in each], [w + s for s in each],
        full=None if full is None else [full + s for s in each],
        communication=Communication(same_node=link, blocks=blocks),
    )  # fmt: skip


def small_problem(
    placement: Placement, microbatches: int, backward: BackwardMode = "split", limit: int | None = None,
    costs: Costs | None = None,
) -> OrderProblem:  # fmt: skip
    budget = None if limit is None else Budget(limit)
    return order_problem(
        placement, microbatches, costs or stage_costs(placement, 3, 4, 2, latency=1), backward, budget
    )
