"""Searched: the best order that a search finds for given costs and memory, in a loop, on a V, or with two opposite pipes.

ZB-auto is the searched order with one stage per rank, split backwards and the memory of the zero-bubble paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from penstock.base.counts import require_count
from penstock.base.errors import ScheduleError
from penstock.schedule.families.starts import catalogue_starts
from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.search.best_order import OrderSearch
from penstock.schedule.search.order_problem import BackwardMode, OrderProblem, pipes_of

Shape = Literal["loop", "v", "bidirectional"]
Cost = float | Sequence[float]

ROUNDS = 16
"""Rounds of a search: their number, not their time, so that every process of a run finds the same order."""


def shaped_placement(shape: str, ranks: int, virtual_stages: int) -> Placement:
    """Return the placement of a shape: "loop", "v" (down and up again), or "bidirectional" (two opposite pipes)."""
    if shape == "loop":
        return Placement.loop(ranks, virtual_stages)
    if shape == "v":
        return Placement.waves(ranks, virtual_stages)
    if shape == "bidirectional":
        # A rank holds one stage of each pipe: by pipe that is 1 stage, together 2.
        if virtual_stages > 2:
            raise ScheduleError(
                f"two pipes have one stage each on every rank, got {virtual_stages} stages per rank; take 1"
            )
        return Placement.two_way(ranks)
    raise ScheduleError(f"the placement must be loop, v or bidirectional, got {shape!r}")


def searched(
    ranks: int,
    microbatches: int,
    virtual_stages: int = 1,
    *,
    placement: Shape = "loop",
    backward: BackwardMode = "split",
    costs: tuple[Cost, Cost, Cost] = (1.0, 1.0, 1.0),
    full: Cost | None = None,
    latency: float = 0.0,
    memory_limit: int | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Schedule:
    """The best order that a search finds; `penstock schedule search` gives it more time, and prints a lower bound.

    Args:
        placement: "loop" (default), "v", or "bidirectional".
        backward: "split" (default) or "full".
        costs: seconds of F, I and W, each one number for a rank, which its stages share, or one per stage (default 1 each).
        full: seconds of a full backward, likewise (default: the seconds of I and W). Where it is quicker, a split backward
            is joined to a full one.
        latency: seconds a message takes between ranks (default 0).
        memory_limit: activations a rank may hold, in microbatches of a stage (default: no limit).

    Raises:
        ScheduleError: if an option is wrong, or no order can meet the memory limit.

    ::

        2 ranks, 3 microbatches
        rank 0  0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    if backward not in ("full", "split"):
        raise ScheduleError(f"searched: the backward is full or split, got {backward!r}")
    if not isinstance(costs, Sequence) or isinstance(costs, str) or len(costs) != 3:
        raise ScheduleError(f"searched: costs are three, of F, I and W, got {costs!r}")
    if not _is_number(latency):
        raise ScheduleError(
            f"searched: the latency must be a number of seconds of at least 0, got {latency!r}"
        )
    for name, count, least in (
        ("rounds", rounds, 0),
        ("seed", seed, 0),
        ("memory_limit", memory_limit or 1, 1),
    ):
        require_count(f"searched: {name}", count, least, kind=ScheduleError)
    placed = shaped_placement(placement, ranks, virtual_stages)
    f, b, w = (_per_stage(name, cost, placed) for name, cost in zip("FIW", costs, strict=True))
    whole = b + w if full is None else _per_stage("B", full, placed)
    seconds = np.zeros((placed.stages, len(Kind)))
    for kind, column in ((Kind.F, f), (Kind.I, b), (Kind.W, w), (Kind.B, whole), (Kind.R, f)):
        seconds[:, kind] = column
    pipes = np.array(pipes_of(placed))
    travel = np.where(pipes[:, 1:] != pipes[:, :-1], float(latency), 0.0)
    budget = None if memory_limit is None else Budget(memory_limit)
    mixed = backward == "split" and bool((whole < b + w).any())
    problem = OrderProblem(
        placement=placed,
        microbatches=microbatches,
        backward=backward,
        seconds=seconds,
        travel=travel,
        budget=budget,
        mixed=mixed,
    )
    search = OrderSearch(problem, catalogue_starts, seed=seed)
    of_stages = tuple(tuple(map(float, cost)) for cost in (f, b, w))
    options: dict[str, object] = {"placement": placement, "backward": backward, "costs": of_stages}
    options |= {"latency": float(latency), "memory_limit": memory_limit, "rounds": rounds, "seed": seed}
    options |= {} if full is None else {"full": tuple(map(float, whole))}
    return search.problem.schedule(search.run(math.inf, rounds).codes, "searched", options)


def zb_auto(
    ranks: int,
    microbatches: int,
    *,
    costs: tuple[Cost, Cost, Cost] = (1.0, 1.0, 1.0),
    latency: float = 0.0,
    memory_limit: int | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Schedule:
    """The searched order of a zero-bubble schedule in the memory of the zero-bubble paper (2401.10241, section 3.1).

    It has one stage per rank and split backwards. It minimises the makespan; the paper, the longest rank. The paper's
    ZB-1p and ZB-2p are the memory limits p and 2p.

    Args:
        costs, latency, rounds, seed: see `searched`.
        memory_limit: activations a rank may hold (default 2p).

    Raises:
        ScheduleError: if an option is wrong, or no order can meet the memory limit.

    ::

        2 ranks, 3 microbatches
        rank 0  0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    limit = 2 * ranks if memory_limit is None else memory_limit
    found = searched(
        ranks, microbatches, costs=costs, latency=latency, memory_limit=limit, rounds=rounds, seed=seed
    )
    return replace(found, name="zb-auto")


def _per_stage(name: str, cost: Cost, placement: Placement) -> np.ndarray:
    each = cost if isinstance(cost, list | tuple) else None
    if each is not None and len(each) != placement.stages:
        raise ScheduleError(
            f"searched: the cost of {name} is one number or one per stage ({placement.stages}), got {len(each)}"
        )
    for seconds in [cost] if each is None else each:
        if not _is_number(seconds):
            raise ScheduleError(
                f"searched: the cost of {name} must be a number of seconds of at least 0, got {seconds!r}"
            )
    if each is None:
        assert isinstance(cost, int | float)  # checked above
        return np.full(placement.stages, cost * placement.ranks / placement.stages)
    return np.array(each, np.float64)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
