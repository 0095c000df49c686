"""Search for the layouts with the shortest step that fit in memory.

The search is best-first branch and bound. A layout without its schedule is bounded by its work; with a placement of its
stages, by `penstock.simulate.bounds`, which holds for every order of the ops; only what could still be best is simulated.
So the best layout found is the best of the whole space, unless the search is ended early.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import count
from time import perf_counter
from typing import Any

import numpy as np

from penstock.errors import ConfigError, ScheduleError
from penstock.plan.cluster import Cluster
from penstock.plan.explore.rejections import Rejections
from penstock.plan.explore.search_result import SearchResult
from penstock.plan.explore.search_space import MAX_VIRTUAL_STAGES, Order, Point, Space, make_space
from penstock.plan.prediction import (
    Prediction,
    blocking_reduction,
    op_costs,
    optimizer_seconds,
    overlaps,
    predict,
    step_program,
)
from penstock.plan.rank_memory import rank_memory, state_bytes
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import (
    LayerTimes,
    StageCosts,
    dtype_of,
    layer_times,
    stage_costs,
    work_shares,
)
from penstock.profile.model_profile import Profile
from penstock.schedule.families.closed_forms import Setting
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.simulate.bounds import lower_bound

DIVES = 40
"""Choices of degrees that are simulated before the rest is bounded."""
STEADY = 4
"""Rounds of as many microbatches as ranks after which a schedule repeats itself."""
LARGE = 40_000
"""Ops of a step beyond which a search simulates fewer microbatches, twice, and draws the line through both."""


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    sequence: int,
    batch: int,
    fixed: Mapping[str, Any] | None = None,
    schedules: Sequence[str] | None = None,
    devices: int | None = None,
    memory: float | None = None,
    top: int = 10,
    limit: float | None = None,
    progress: Callable[[int, int, Prediction | None], None] | None = None,
) -> SearchResult:
    """Search for the layouts with the shortest step.

    Args:
        profile: costs of the model's layers.
        cluster: devices and links.
        sequence: tokens of a sample.
        batch: samples of a step, over all replicas.
        fixed: values of `Layout` that are given, such as ``{"tp": 8, "schedule": "1f1b"}`` (default none).
        schedules: names of families, or paths of CSV files (default: all families but those that search themselves).
        devices: number of devices that a layout uses (default: all).
        memory: bytes of a device that a plan may use (default: all of it).
        top: number of plans to return (default 10).
        limit: seconds after which the search ends with the best so far (default: none).
        progress: function of the numbers of layouts evaluated and simulated, and the best plan so far; called often.
            KeyboardInterrupt ends the search with the best so far.

    Raises:
        ConfigError: if an input is wrong. If no layout fits, `SearchResult.best` raises it.
    """
    if memory is not None:
        if not memory > 0:
            raise ConfigError(f"memory must be above 0 bytes, got {memory}")
        cluster = replace(cluster, device=replace(cluster.device, memory=float(memory)))
    space = make_space(profile, cluster, sequence, batch, fixed or {}, schedules, devices)
    run = _Search(space, top)
    began = perf_counter()
    complete = True
    try:
        for _ in run.steps():
            if progress is not None:
                progress(run.evaluated, run.simulated, run.leader)
            if limit is not None and perf_counter() - began > limit:
                complete = False
                break
    except KeyboardInterrupt:
        complete = False
    plans = run.plans()
    reasons = run.rejections.reasons(plans[0], cluster.device.memory) if plans else {}
    return SearchResult(
        plans,
        run.evaluated,
        run.simulated,
        perf_counter() - began,
        complete,
        reasons,
        run.rejections.smallest,
    )


@dataclass(order=True)
class _Candidate:
    """A layout, as far as it is chosen, with a bound on its seconds; ordered by bound, then by estimate.

    Attributes:
        bound: seconds that the layout needs at least.
        estimate: seconds that it will probably need.
        number: number of the candidate, which breaks ties.
        point: layout but for its schedule.
        orders: schedules that it may have: none until placements are compared, one when its bound is of that schedule.
        costs: costs of its stages, once its placement is chosen.
        bounded: True if the bound is of the schedule's simulation.
    """

    bound: float
    estimate: float
    number: int
    point: Point = field(compare=False)
    orders: tuple[Order, ...] = field(default=(), compare=False)
    costs: StageCosts | None = field(default=None, compare=False)
    bounded: bool = field(default=False, compare=False)


class _Search:
    """State of one search.

    Args:
        space: layouts to search.
        top: number of plans to return.
    """

    def __init__(self, space: Space, top: int) -> None:
        self.space = space
        self.top = top
        self.evaluated = self.simulated = 0
        self.rejections = Rejections()
        self._best: dict[Any, Prediction] = {}
        self._number = count()
        self._heap: list[_Candidate] = []
        self._times = cache(self._layer_times)

    @property
    def leader(self) -> Prediction | None:
        """The quickest plan so far."""
        return min(self._best.values(), key=lambda plan: plan.step_seconds, default=None)

    def steps(self) -> Iterator[None]:
        """Yield after each step of the search, until nothing is left that could be among the best."""
        for point in self.space.points():
            self._add_point(point)
        yield from self._dive()
        while self._heap and self._heap[0].bound < self._threshold():
            self._advance(heapq.heappop(self._heap))
            yield
        for candidate in self._heap:
            self.rejections.add_bound(candidate.point.layout, candidate.orders, candidate.bound)

    def _dive(self) -> Iterator[None]:
        """Simulate promising layouts of several degrees first: the sooner a plan is good, the more its time prunes."""
        seen: set[tuple[int, int, int]] = set()
        for candidate in sorted(self._heap):
            layout = candidate.point.layout
            degrees = (layout.pp, layout.dp, layout.tp)
            if degrees in seen or len(seen) == DIVES or candidate.bound >= self._threshold():
                continue
            opened = [order for group in self._open(candidate) for order in self._open(group)]
            if opened:
                seen.add(degrees)
            for promising in sorted(opened, key=lambda c: c.estimate)[:2]:
                self._simulate(promising)
                yield

    def _advance(self, candidate: _Candidate) -> None:
        if candidate.bounded:
            self._simulate(candidate)
        else:
            for opened in self._open(candidate):
                heapq.heappush(self._heap, opened)

    def _open(self, candidate: _Candidate) -> list[_Candidate]:
        """Choose one more thing of a layout: the placement of its stages, or then the schedule."""
        return self._bound_orders(candidate) if candidate.orders else self._choose_placements(candidate)

    def plans(self) -> tuple[Prediction, ...]:
        """Return the best plans, each predicted from its whole step."""
        quickest = sorted(self._best.values(), key=lambda plan: plan.step_seconds)[: self.top]
        exact = [plan if plan.program is not None else self._predict(plan.layout) for plan in quickest]
        return tuple(sorted((p for p in exact if p.fits), key=lambda plan: plan.step_seconds))

    def _threshold(self) -> float:
        """Return the seconds that a layout must beat to be among the best."""
        times = sorted(plan.step_seconds for plan in self._best.values())
        return times[self.top - 1] if len(times) >= self.top else math.inf

    def _layer_times(self, layout: Layout) -> LayerTimes:
        space = self.space
        return layer_times(space.profile, space.cluster, layout, space.sequence)

    def _times_of(self, layout: Layout) -> LayerTimes:
        """Return the layers' times, which depend on few of a layout's values."""
        return self._times(
            replace(layout, pp=1, dp=1, v=None, schedule=Layout.schedule, zero=False, split="even")
        )

    def _add_point(self, point: Point) -> None:
        """Bound a layout by its work and its states, shared equally by all ranks."""
        layout = point.layout
        times = self._times_of(layout)
        dtype = dtype_of(self.space.profile, self.space.cluster, layout)
        kept = np.minimum(times.kept, times.saved) if layout.recompute != "none" else times.saved
        parameters = float(times.parameters.sum()) - (times.table.tied if layout.pp == 1 else 0)
        size = (state_bytes(parameters, layout, dtype) + float(kept.sum())) / layout.pp
        if size > self.space.cluster.device.memory:
            self.evaluated += 1
            self.rejections.add_too_large(layout, size, False)
            return
        again = times.again[times.recomputes].sum() if layout.recompute in ("full", "selective") else 0.0
        work = float((times.forward + times.input_grad + times.weight_grad).sum() + again)
        self.evaluated += 1
        bound = point.microbatches * work / layout.pp + self._least_fill(times, layout.pp)
        heapq.heappush(self._heap, self._candidate(bound, 0.0, point))

    def _least_fill(self, times: LayerTimes, pp: int) -> float:
        """Return a bound on the seconds that the ranks wait for their first op, in the mean over the ranks.

        In a loop, rank r waits for r forwards of a stage; in two pipes that meet, for the shorter way. Halved, as a split by
        cost gives the stages of embedding and head fewer blocks.
        """
        roles = times.table.roles
        blocks = roles.count("block")
        v = max(1, min(blocks // pp, MAX_VIRTUAL_STAGES))
        forward = float(times.forward[roles.index("block")])
        loop = (pp - 1) / 2 * (blocks // (pp * v)) * forward
        two_way = max(0.0, (pp - 2) / 4) * (blocks // pp) * forward
        return min(loop, two_way) / 2

    def _candidate(self, bound: float, estimate: float, point: Point, **chosen: Any) -> _Candidate:
        return _Candidate(bound, estimate, next(self._number), point, **chosen)

    def _choose_placements(self, candidate: _Candidate) -> list[_Candidate]:
        """Bound a layout with every placement of its stages by the work of its busiest rank."""
        point, opened = candidate.point, []
        groups: dict[Placement, list[Order]] = {}
        for order in self.space.orders(point.layout.pp, point.microbatches):
            groups.setdefault(order.placement, []).append(order)
        for placement, orders in groups.items():
            layout = replace(point.layout, v=orders[0].v)
            self.evaluated += len(orders)
            try:
                costs = stage_costs(self._times_of(layout), layout, placement)
            except ConfigError:
                continue  # the split does not fit so many stages
            if self._too_large(layout, orders, placement, costs):
                continue
            work = work_shares(placement) @ (
                costs.forward + costs.input_grad + costs.weight_grad + costs.again
            )
            bound = max(point.microbatches * float(work.max()), candidate.bound)
            at = replace(point, layout=layout)
            for splits in {order.splits_backward for order in orders}:
                chosen = tuple(order for order in orders if order.splits_backward == splits)
                opened.append(self._candidate(bound, 0.0, at, orders=chosen, costs=costs))
        return opened

    def _bound_orders(self, candidate: _Candidate) -> list[_Candidate]:
        """Bound the schedules of one placement by `lower_bound`, which they share, and estimate each."""
        point, costs, space = candidate.point, candidate.costs, self.space
        assert costs is not None, "its placement is chosen"
        layout, m, order = point.layout, point.microbatches, candidate.orders[0]
        placement = order.placement
        table = op_costs(costs, space.cluster, layout)
        work = work_shares(placement) @ (costs.forward + costs.input_grad + costs.weight_grad + costs.again)
        ranks = {0, layout.pp // 2, layout.pp - 1, int(work.argmax())}
        least = float(
            lower_bound(placement, m, table, "split" if order.splits_backward else "full", ranks).makespan
        )
        dtype = dtype_of(space.profile, space.cluster, layout)
        rest = optimizer_seconds(costs, space.cluster, layout, dtype, placement.stages_of)
        rest += space.cluster.step_overhead + space.profile.step_overhead
        if not overlaps(space.cluster, layout):
            rest += blocking_reduction(costs, space.cluster, layout, dtype, placement)
        bound = max(candidate.bound, least + rest)
        mean = table.seconds.mean(axis=0) * placement.stages / placement.ranks
        f, b, w = (float(mean[kind]) for kind in (Kind.F, Kind.I, Kind.W))
        setting = Setting(layout.pp, m, order.v or 1, Fraction(f), Fraction(b), Fraction(w))
        opened = []
        for order in candidate.orders:
            bubble = None if order.family is None else order.family.bubble.value(setting)
            estimate = bound if bubble is None else max(bound, m * (f + b + w) + float(bubble) + rest)
            opened.append(self._candidate(bound, estimate, point, orders=(order,), costs=costs, bounded=True))
        return opened

    def _too_large(
        self, layout: Layout, orders: Sequence[Order], placement: Placement, costs: StageCosts
    ) -> bool:
        """Return whether a layout exceeds the memory with one microbatch on each rank, the least of all orders."""
        dtype = dtype_of(self.space.profile, self.space.cluster, layout)
        each = state_bytes(1.0, layout, dtype) * costs.parameters + costs.saved
        largest = float(((work_shares(placement) > 0) @ each).max())
        if largest <= self.space.cluster.device.memory:
            return False
        for order in orders:
            self.rejections.add_too_large(replace(layout, schedule=order.name), largest, False)
        return True

    def _simulate(self, candidate: _Candidate) -> None:
        """Predict a layout with its schedule, with and without ZeRO; keep what fits."""
        (order,) = candidate.orders
        for layout in self.space.variants(replace(candidate.point.layout, schedule=order.name)):
            try:
                size = self._peak_bytes(layout, candidate)
            except ScheduleError:
                return  # the family does not allow the counts
            if size > self.space.cluster.device.memory:
                self.rejections.add_too_large(layout, size)
                return  # without ZeRO, it needs more
            plan = self._quick_prediction(layout, candidate.point.microbatches, order)
            self.simulated += 1
            self.rejections.add_plan(plan)
            key = (layout.pp, layout.dp, layout.tp, plan.layout.v, layout.microbatch, layout.schedule)
            known = self._best.get(key)
            if known is None or plan.step_seconds < known.step_seconds:
                self._best[key] = plan

    def _peak_bytes(self, layout: Layout, candidate: _Candidate) -> float:
        """Return the bytes of the fullest device, from a step that is long enough for the schedule's steady state."""
        assert candidate.costs is not None, "its placement is chosen"
        (order,) = candidate.orders
        m = candidate.point.microbatches
        if order.family is not None and m > STEADY * layout.pp:
            m = STEADY * layout.pp + m % layout.pp
        schedule = step_program(order.name, layout.pp, m, layout.v).schedule
        dtype = dtype_of(self.space.profile, self.space.cluster, layout)
        return max(rank.total for rank in rank_memory(schedule, candidate.costs, layout, dtype))

    def _quick_prediction(self, layout: Layout, microbatches: int, order: Order) -> Prediction:
        """Return a layout's prediction; of a long step, from two shorter ones, and without program and trace."""
        few = STEADY * layout.pp + microbatches % layout.pp
        ops = 3 * layout.pp * (order.v or 1) * microbatches
        if ops <= LARGE or microbatches <= few + layout.pp or order.family is None:
            return self._predict(layout)
        # Beyond the fill, each round of pp microbatches takes the same time.
        share = layout.dp * layout.microbatch
        first, second = (self._predict(layout, share * m) for m in (few, few + layout.pp))
        rounds = (microbatches - few) // layout.pp
        seconds = first.step_seconds + rounds * max(0.0, second.step_seconds - first.step_seconds)
        return replace(second, step_seconds=seconds, program=None, trace=None)

    def _predict(self, layout: Layout, batch: int | None = None) -> Prediction:
        space = self.space
        return predict(
            space.profile, space.cluster, layout, sequence=space.sequence, batch=batch or space.batch
        )
