"""ZB-auto: a zero-bubble schedule searched for given costs and memory, with one stage per rank.

Many greedy constructions are tried (`greedy.construct`), the best ones are varied rank by rank, and single ops of the
result are moved (`greedy.improve`). ZB-H1 and ZB-H2 are among the candidates if they fit the memory, so the result is
never worse than they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, TypeGuard

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ScheduleError
from penstock.schedule.families.greedy import KINDS, Policy, Problem, Score, construct, improve, score
from penstock.schedule.families.phases import occurrence
from penstock.schedule.families.zero_bubble import zb_h1, zb_h2
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule, plain_columns

Objective = Literal["longest", "makespan"]
Cost = float | Sequence[float]

EFFORT = 6_000_000
"""Ops that all constructions together may time; the moves may time half as many."""

# Order matters: `_search` tries the grid from the front and stops when its constructions are used up.
_SLACKS = (0.0, 0.999, 0.5, 0.75, 0.25)
_STYLES = ((math.inf, False), (0.0, False), (0.0, True), (0.5, False), (1.0, False), (0.5, True), (1.0, True))
_SAME = 1e-9
"""Relative difference up to which two times differ by rounding alone."""
_STARTS = 3
_MOVES_AN_OP = 200


def zb_auto(
    ranks: int,
    microbatches: int,
    *,
    costs: tuple[Cost, Cost, Cost] = (1.0, 1.0, 1.0),
    latency: float = 0.0,
    memory_limit: float | None = None,
    kept: float = 1.0,
    objective: Objective = "longest",
) -> Schedule:
    """Automatic zero-bubble schedule (2401.10241, section 3.1, with more candidates than the paper's).

    One stage per rank. The paper's ZB-1p and ZB-2p are the memory limits p and 2p.

    Args:
        costs: seconds of F, I and W, each one number or one per stage (default 1 each).
        latency: seconds a message takes from rank to rank (default 0).
        memory_limit: activations a rank may hold, in microbatches of a stage (default 2p).
        kept: part of an activation that stays from I to W (default 1: activations are freed at W). The paper frees at B
            all but M_W / M_B of it.
        objective: measure to minimise first: "longest" (default), the largest time from a rank's first op to its last
            (the paper's cost), or "makespan". The other measure is never worse than in the best handcrafted
            schedule that fits the memory.

    Raises:
        ScheduleError: if costs are negative, not finite or not one per stage, or no order can meet the memory limit.

    ::

        2 ranks, 3 microbatches
        rank 0  0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
        rank 1  1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    p, m = ranks, microbatches
    limit = 2.0 * p if memory_limit is None else memory_limit
    if not _is_number(limit) or limit < 1:
        raise ScheduleError(
            f"zb-auto: no order can meet a memory limit of {limit!r} activations; a rank holds the one it works "
            "on, so 1 is the least"
        )
    if not _is_number(kept) or not 0 <= kept <= 1:
        raise ScheduleError(
            f"zb-auto: kept is the part of an activation that stays until W, 0 to 1, got {kept!r}"
        )
    if objective not in ("longest", "makespan"):
        raise ScheduleError(f"zb-auto: the objective is longest or makespan, got {objective!r}")
    if not isinstance(costs, Sequence) or isinstance(costs, str) or len(costs) != 3:
        raise ScheduleError(f"zb-auto: costs are three, of F, I and W, got {costs!r}")
    f, b, w = (_per_stage(name, cost, p) for name, cost in zip("FIW", costs, strict=True))
    if not _is_number(latency) or latency < 0:
        raise ScheduleError(
            f"zb-auto: the latency must be a number of seconds of at least 0, got {latency!r}"
        )
    problem = Problem(
        microbatches=m,
        forward=f,
        input_gradient=b,
        weight_gradient=w,
        latency=float(latency),
        limit=float(limit),
        kept=float(kept),
    )
    lists = _best_lists(problem, objective)
    columns = [plain_columns(r, KINDS[lists[r]], occurrence(lists[r].astype(np.int64))) for r in range(p)]
    options = {
        "costs": tuple(_brief(cost) for cost in (f, b, w)),
        "latency": float(latency),
        "memory_limit": float(limit),
        "kept": float(kept),
        "objective": objective,
    }
    return Schedule.from_columns("zb-auto", Placement.loop(p), m, columns, options)


Rank = tuple[bool, float, float]
"""Sort key of a score, best first: whether the other measure exceeds the bound, the minimised measure, the other."""


@dataclass(frozen=True)
class _Target:
    """Goal of the search.

    Attributes:
        first: index in `Score` of the measure to minimise.
        bound: largest value allowed for the other measure.
    """

    first: int
    bound: float
    lower_bound: Score

    def __call__(self, value: Score) -> Rank:
        other = value[1 - self.first]
        return other > self.bound, value[self.first], other

    def reached(self, rank: Rank) -> bool:
        """Return whether no order can be better."""
        first, other = self.lower_bound[self.first], self.lower_bound[1 - self.first]
        return rank[1] <= first * (1 + _SAME) and rank[2] <= other * (1 + _SAME)


def _best_lists(problem: Problem, objective: Objective) -> npt.NDArray[np.int8]:
    """Return the best lists, as `greedy` numbers ops, shape (ranks, 3·microbatches)."""
    first = 0 if objective == "longest" else 1
    fixed = [(score(problem, lists), lists) for lists in _handcrafted(problem)]
    bound = min(((s[first], s[1 - first]) for s, _ in fixed), default=(0.0, math.inf))[1] * (1 + _SAME)
    target = _Target(first, bound, problem.lower_bound)
    tried = construct(problem, _search(problem, target))[1]
    rank, _, lists = min(
        (target(times), n, lists) for n, (times, lists) in enumerate([*fixed, (score(problem, tried), tried)])
    )
    if target.reached(rank):
        return lists
    ops = lists.size
    return improve(problem, lists, first, bound, min(_MOVES_AN_OP * ops, EFFORT // 2 // ops))


def _handcrafted(problem: Problem) -> Iterator[npt.NDArray[np.int8]]:
    """Yield the lists of ZB-H1 and ZB-H2, if they fit."""
    p, m = problem.ranks, problem.microbatches
    for build in (zb_h1, zb_h2):
        kinds = build(p, m).kind.reshape(p, 3 * m)
        lists = np.searchsorted(KINDS, kinds).astype(np.int8)
        if problem.fits(lists):
            yield lists


def _search(problem: Problem, target: _Target) -> Policy:
    """Return the best policy of a grid with equal ranks, after changing single ranks of the best few."""
    p, m = problem.ranks, problem.microbatches
    # Each construction times the 3·p·m ops of the step.
    left = max(60, EFFORT // (3 * p * m))
    entries: list[tuple[Rank, int, Policy]] = []
    for n, ((patience, backward_first), slack, ahead) in enumerate(
        product(_STYLES, _SLACKS, _warm_ups(problem))
    ):
        # A third of the constructions is kept for changing single ranks.
        if n >= left * 2 // 3:
            break
        policy = Policy(ahead, np.full(p, slack), np.full(p, patience), np.full(p, backward_first))
        entries.append((target(construct(problem, policy)[0]), n, policy))
        if target.reached(entries[-1][0]):
            return policy
    left -= len(entries)
    entries.sort(key=lambda entry: entry[:2])
    best, _, best_policy = entries[0]
    for rank, _, policy in entries[:_STARTS]:
        better = True
        while better and left > 0 and not target.reached(rank):
            better = False
            for changed in _neighbours(problem, policy):
                left -= 1
                changed_rank = target(construct(problem, changed)[0])
                if changed_rank < rank:
                    rank, policy, better = changed_rank, changed, True
                if left <= 0:
                    break
        if rank < best:
            best, best_policy = rank, policy
    return best_policy


def _neighbours(problem: Problem, policy: Policy) -> Iterator[Policy]:
    """Yield the policies that differ on one rank."""
    for r in range(problem.ranks):
        for step in (1, -1):
            ahead = int(policy.ahead[r]) + step
            if 1 <= ahead <= problem.max_ahead:
                yield replace(policy, ahead=_with(policy.ahead, r, ahead))
        yield replace(policy, backward_first=_with(policy.backward_first, r, not policy.backward_first[r]))
        for slack in _SLACKS:
            yield replace(policy, slack=_with(policy.slack, r, slack))
        for patience in (0.0, 0.5, 1.0, math.inf):
            yield replace(policy, patience=_with(policy.patience, r, patience))


def _with(column: np.ndarray, rank: int, value: float | bool) -> np.ndarray:
    changed = column.copy()
    changed[rank] = value
    return changed


def _warm_ups(problem: Problem) -> list[npt.NDArray[np.int64]]:
    """Return candidates for `Policy.ahead`: by depth, and by the round trip of a gradient."""
    p, f = problem.ranks, problem.forward
    depth = np.arange(p - 1, -1, -1)
    ways = []
    with np.errstate(divide="ignore", invalid="ignore"):
        fitting = np.where(f > 0, problem.round_trip / f, problem.max_ahead)
    for round_up in (0.999, 0.5, 0.0):
        ways.append(fitting + round_up)
    for more in (1, 2, 3):
        for factor in (2.0, 1.0, 1.5, 1.25, 1.75, 2.25, 2.5):
            # Without the 1e-9, rounding could raise a whole product to the next number.
            ways.append(np.ceil(factor * depth - 1e-9) + more)
    ways.append(np.full(p, problem.max_ahead))
    unique = {tuple(np.clip(way, 1, problem.max_ahead).astype(np.int64).tolist()): None for way in ways}
    return [np.array(way, np.int64) for way in unique]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _per_stage(name: str, cost: object, stages: int) -> npt.NDArray[np.float64]:
    costs = list(cost) if isinstance(cost, Sequence) and not isinstance(cost, str) else [cost] * stages
    if len(costs) != stages:
        raise ScheduleError(
            f"zb-auto: {len(costs)} costs of {name} do not cover {stages} stages; give one or {stages}"
        )
    for stage, seconds in enumerate(costs):
        if not _is_number(seconds) or seconds < 0:
            raise ScheduleError(
                f"zb-auto: the cost of {name} on stage {stage} must be a number of seconds of at least 0, "
                f"got {seconds!r}"
            )
    return np.array(costs, np.float64)


def _brief(cost: npt.NDArray[np.float64]) -> float | tuple[float, ...]:
    """Return one number if all stages cost the same."""
    return float(cost[0]) if (cost == cost[0]).all() else tuple(cost.tolist())
