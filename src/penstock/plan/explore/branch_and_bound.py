"""Search for the layouts with the shortest step that fit in memory.

The search is best-first branch and bound. A layout without its schedule is bounded by its work; with a placement of its
stages, by `penstock.simulate.bounds`, which holds for every order of the ops; only what could still be best is simulated.
So no layout of the space is quicker than the first of the result, unless the search is ended early. Steps of more than
`LARGE` ops are first extrapolated from shorter ones; those among the best are then predicted in full.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import count, takewhile
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError, PenstockError, ScheduleError
from penstock.plan.cluster import Cluster, sized_name, with_memory
from penstock.plan.explore.layout_bounds import (
    least_bytes,
    least_placed_bytes,
    least_seconds,
    seconds_after_pipeline,
)
from penstock.plan.explore.rejections import GROUPS, SAME, Reason, Rejections, Smallest
from penstock.plan.explore.search_result import SearchResult, SimulatedLayout
from penstock.plan.explore.search_space import Order, Point, Space, make_space, not_compared, order_of_ops
from penstock.plan.op_costs import op_costs
from penstock.plan.prediction import Prediction, predict
from penstock.plan.rank_devices import RankDevices, arrangements, needs_text, why_not_planned
from penstock.plan.rank_memory import bound_sharded, fitting_costs, rank_memory
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import (
    LayerTimes,
    StageCosts,
    dtype_of,
    even_counts,
    layer_times,
    require_inputs,
    work_shares,
)
from penstock.profile.model_profile import Profile
from penstock.schedule.families import FAMILIES
from penstock.schedule.families.closed_forms import Setting
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.simulate.bounds import lower_bound

DIVES = 40
"""Choices of degrees that are simulated before the rest is bounded."""
STEADY = 4
"""Rounds, most of as many microbatches as ranks, after which a schedule repeats itself."""
LARGE = 40_000
"""Ops of a step beyond which a search simulates fewer microbatches, twice, and draws the line through both."""


_Progress = Callable[[int, int, Prediction | None], None]


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
    progress: _Progress | None = None,
) -> SearchResult:
    """Search for the layouts with the shortest step.

    Args:
        profile: costs of the model's layers.
        cluster: devices and links.
        sequence: tokens of a sample.
        batch: samples of a step, over all replicas.
        fixed: values of `Layout` that are given, such as ``{"tp": 8, "schedule": "1f1b"}`` (default none).
        schedules: names of families, or paths of CSV files (default: all families that build their order without a search,
            but round-trip, which has all weights on every rank).
        devices: number of devices that a layout uses (default: all).
        memory: bytes of a device that a plan may use, at most all of it (default: all but the device's reserve).
        top: number of plans to return (default 10).
        limit: seconds after which the search ends with the best so far (default: none).
        progress: function of the numbers of layouts evaluated and simulated, and the best plan so far; called often.
            KeyboardInterrupt ends the search with the best so far.

    Raises:
        ConfigError: if an input is wrong. If no layout fits, `SearchResult.best` raises it.
    """
    require_inputs(profile, cluster)
    cluster = cluster if memory is None else with_memory(cluster, memory)
    if devices is not None and len(cluster.groups) > 1:
        raise ConfigError(
            f"devices are chosen by group: write the groups of {cluster.name} with as many as you use, got {devices}"
        )
    if why := why_not_planned(profile, cluster, (fixed or {}).get("store", "none")):
        raise ConfigError(why)
    spaces, empty = _spaces(
        profile,
        cluster,
        sequence=sequence,
        batch=batch,
        fixed=fixed or {},
        schedules=schedules,
        devices=devices,
    )
    began = perf_counter()
    runs = _cover(spaces, top, began, limit, progress)
    stored = []
    if all(run.complete and run.leader is None for run in runs):
        stored = [space for run in runs if (space := run.space.with_store()) is not None]
    if stored:
        runs = _cover(stored, top, began, limit, progress)
    complete = all(run.complete for run in runs)
    best = min(runs, key=lambda run: math.inf if run.leader is None else run.leader.step_seconds)
    space = best.space
    plans = tuple(distinct(plan for run in runs for plan in run.plans())[:top])
    reasons = best.rejections.reasons(plans[0], space.cluster) if plans else {}
    others = [run for run in runs if run is not best]
    if plans and (others or empty):
        reasons[GROUPS] = {
            sized_name(run.space.cluster): _reason_of(run, plans[0]) for run in others
        } | dict.fromkeys(empty, Reason("cannot run"))
    return SearchResult(
        plans=plans,
        evaluated=sum(run.evaluated for run in runs),
        simulated=sum(run.simulated for run in runs),
        seconds=perf_counter() - began,
        complete=complete,
        rejections=reasons,
        smallest=best.rejections.smallest
        if plans or not complete
        else smallest_layout(space, best.rejections),
        outcomes=best.outcomes(),
        not_compared=not_compared(space),
        space=space,
        needs_store=bool(stored),
    )


def _spaces(profile: Profile, cluster: Cluster, **given: Any) -> tuple[list[Space], list[str]]:
    """Return the space of a cluster; of unlike groups, also of other orders and fewer of them. And names of empty ones."""
    spaces, errors = [], {}
    for arranged in arrangements(cluster):
        try:
            spaces.append(make_space(profile, arranged, **given))
        except ConfigError as error:
            errors[sized_name(arranged)] = error
    if not spaces:
        raise next(iter(errors.values()))
    return spaces, list(errors)


def _cover(
    spaces: Sequence[Space],
    top: int,
    began: float,
    limit: float | None,
    progress: _Progress | None,
) -> list[_Search]:
    """Search spaces one after the other, each for its share of the time."""
    runs = []
    for number, space in enumerate(spaces, 1):
        until = began + (math.inf if limit is None else limit * number / len(spaces))
        run = _Search(space, top)
        run.search(until, progress)
        if run.complete and run.leader is None and not space.shards and "shard" not in space.fixed:
            run = _Search(replace(space, shards=True), top)
            run.search(until, progress)
        runs.append(run)
        if not run.complete and perf_counter() <= until:
            break  # by KeyboardInterrupt
    return runs


def _reason_of(run: _Search, best: Prediction) -> Reason:
    """Return the reason against the groups of devices that a run searched."""
    if run.leader is not None:
        slower = run.leader.step_seconds / best.step_seconds - 1
        return Reason(f"{slower:.1%} slower" if slower > SAME else "as fast", slower, True)
    if (smallest := run.rejections.smallest) is not None:
        return Reason(f"does not fit: at least {needs_text(run.space.cluster, smallest.size)}")
    return Reason("cannot run")


def distinct(plans: Iterable[Prediction]) -> list[Prediction]:
    """Return the quickest plan for each choice of degrees, microbatch and schedule, the quickest first.

    Of layouts that differ in v alone, it is the quickest. Schedules with the same step and memory, as two whose orders are
    the same for these counts, are one: the first in the catalogue.
    """
    places = {name: n for n, name in enumerate(FAMILIES)}
    keyed = [
        (float(f"{p.step_seconds:.9g}"), places.get(p.layout.schedule, -1), p.layout.v or 1, p) for p in plans
    ]
    chosen: dict[Any, Prediction] = {}
    schedules: set[Any] = set()
    for seconds, _, _, plan in sorted(keyed, key=lambda entry: entry[:3]):
        at = plan.layout
        counts = (at.pp, at.dp, at.tp, at.ep, at.cp, at.microbatch)
        if (*counts, at.schedule) not in schedules:
            schedules.add((*counts, at.schedule))
            chosen.setdefault((*counts, seconds, f"{plan.peak_bytes:.9g}"), plan)
    return list(chosen.values())


@dataclass(order=True, kw_only=True)
class _Candidate:
    """A layout, as far as it is chosen, with a bound on its seconds; ordered by bound, then by estimate."""

    bound: float
    estimate: float
    number: int
    point: Point = field(compare=False)
    # Schedules that it may have: none until placements are compared, one when its bound is of that
    # schedule.
    orders: tuple[Order, ...] = field(default=(), compare=False)
    costs: StageCosts | None = field(default=None, compare=False)
    # Seconds that it needs at least after the pipeline, once its placement is chosen.
    rest: float = field(default=0.0, compare=False)
    bounded: bool = field(default=False, compare=False)  # the bound is of the schedule's simulation
    # Only sharded gradients or weights may make it fit.
    sharded: bool = field(default=False, compare=False)


_WHOLE: dict[str, Any] = {"shard": "none", "window": None, "reduce_every": None}
_UNTIMED = {**_WHOLE, "pp": 1, "dp": 1, "v": None, "schedule": Layout.schedule, "split": "even"}
"""Values of a layout's keys that the layers' times do not depend on."""
_Limits = npt.NDArray[np.float64]
_Sizes = Callable[[Schedule, StageCosts, Layout, str, _Limits], float]


def _fullest(schedule: Schedule, costs: StageCosts, layout: Layout, dtype: str, limits: _Limits) -> float:
    """Return the peak bytes of the fullest device, each rank's divided by its limit."""
    sizes = np.array([rank.total for rank in rank_memory(schedule, costs, layout, dtype)])
    return float((sizes / limits).max())


class _Search:
    """Search of one space."""

    def __init__(self, space: Space, top: int) -> None:
        self.space = space
        self.top = top
        self.evaluated = self.simulated = 0
        self.rejections = Rejections()
        self._simulations: dict[Layout, Prediction] = {}
        self._ranking: list[Prediction] | None = None
        self._number = count()
        self._heap: list[_Candidate] = []
        self._times = cache(self._layer_times)
        self.complete = False

    def search(self, until: float, progress: _Progress | None) -> None:
        """Search until nothing is left, or the time or KeyboardInterrupt ends it."""
        try:
            for _ in self._steps():
                if progress is not None:
                    progress(self.evaluated, self.simulated, self.leader)
                if perf_counter() > until:
                    return
        except KeyboardInterrupt:
            return
        self.complete = True

    @property
    def leader(self) -> Prediction | None:
        """The quickest plan so far."""
        return next(iter(self._ranked()), None)

    def _steps(self) -> Iterator[None]:
        """Yield after each step of the search, until nothing is left that could be among the best."""
        for point in self.space.points():
            self._add_point(point)
        self._begin()
        yield
        yield from self._dive()
        searching = True
        while searching:
            while self._heap and self._heap[0].bound < self._threshold():
                self._advance(heapq.heappop(self._heap))
                yield
            # Predicted in full, one of the best may be slower or larger, so that other layouts are worth a simulation again.
            searching = self._refine()
            yield
        for candidate in self._heap:
            self.rejections.add_bound(candidate.point.layout, candidate.orders, candidate.bound)

    def _begin(self) -> None:
        """Simulate layouts that need little memory until one fits, so that the search may end at any time."""
        sized = [
            (least_bytes(self.space, c.point.layout, self._times_of(c.point.layout)), c) for c in self._heap
        ]
        roomy = [c for size, c in sized if size < self.space.most_bytes / 2]
        roomy.sort(key=lambda c: c.bound * c.point.layout.pp * c.point.microbatches)  # soon simulated
        for candidate in (*roomy[:DIVES], *(c for _, c in sorted(sized)[:DIVES])):
            opened = [order for group in self._open(candidate) for order in self._open(group)]
            if opened:
                self._simulate(min(opened, key=lambda c: (c.orders[0].name != Layout.schedule, c.estimate)))
            if self.leader is not None:
                return

    def _dive(self) -> Iterator[None]:
        """Simulate promising layouts of several degrees first: the sooner a plan is good, the more its time prunes."""
        seen: set[tuple[int, ...]] = set()
        for candidate in sorted(self._heap):
            layout = candidate.point.layout
            degrees = (layout.pp, layout.dp, layout.tp, layout.ep, layout.cp)
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
        while self._refine():
            pass
        return tuple(self._ranked()[: self.top])

    def outcomes(self) -> tuple[SimulatedLayout, ...]:
        """Return time and memory of every simulated layout that fits."""
        return tuple(
            SimulatedLayout(p.layout, p.step_seconds, p.peak_bytes) for p in self._simulations.values()
        )

    def _refine(self) -> bool:
        """Predict the whole step of an extrapolated plan among the best; return False if there is none."""
        for plan in self._ranked()[: self.top]:
            if plan.program is None:
                del self._simulations[plan.layout]
                self._keep(self._predict(plan.layout))
                return True
        return False

    def _keep(self, plan: Prediction) -> None:
        """Note a plan, unless it does not fit."""
        self._ranking = None
        if plan.fits:
            self._simulations[plan.layout] = plan
            self.rejections.add_plan(plan)
        else:
            self.rejections.add_too_large(plan.layout, _needed(self.space, plan))

    def _ranked(self) -> list[Prediction]:
        """Return the plans so far, the quickest first; see `distinct`."""
        if self._ranking is None:
            self._ranking = distinct(self._simulations.values())
        return self._ranking

    def _threshold(self) -> float:
        """Return the seconds that a layout must beat to be among the best."""
        ranked = self._ranked()
        return ranked[self.top - 1].step_seconds if len(ranked) >= self.top else math.inf

    def _layer_times(self, layout: Layout) -> LayerTimes:
        space = self.space
        return layer_times(space.profile, space.cluster, layout, space.sequence)

    def _times_of(self, layout: Layout) -> LayerTimes:
        """Return the layers' times, which depend on few of a layout's values."""
        return self._times(replace(layout, **_UNTIMED))

    def _add_point(self, point: Point) -> None:
        """Bound a layout by its work and its states, shared equally by all ranks."""
        layout = point.layout
        times = self._times_of(layout)
        size = least_bytes(self.space, layout, times)
        if size > self.space.most_bytes and self.space.may_shard(layout):
            size = least_bytes(self.space, replace(layout, shard="weights"), times)
        if size > self.space.most_bytes:
            self.evaluated += 1
            self.rejections.add_too_large(layout, size, False)
            return
        self.evaluated += 1
        bound = least_seconds(self.space, point, times)
        heapq.heappush(self._heap, self._candidate(bound, 0.0, point))

    def _candidate(self, bound: float, estimate: float, point: Point, **chosen: Any) -> _Candidate:
        return _Candidate(bound=bound, estimate=estimate, number=next(self._number), point=point, **chosen)

    def _choose_placements(self, candidate: _Candidate) -> list[_Candidate]:
        """Bound a layout with every placement of its stages by the work of its busiest rank."""
        point, opened = candidate.point, []
        usable = self.space.most_bytes
        groups: dict[Placement, list[Order]] = {}
        for order in self.space.orders(point.layout.pp, point.microbatches):
            groups.setdefault(order.placement, []).append(order)
        for placement, placed_so in groups.items():
            at = replace(point.layout, v=placed_so[0].v)
            for layout, costs, orders in self._splits(at, placement, placed_so, point.microbatches):
                self.evaluated += len(orders)
                sharded = not self.space.variants(layout)
                if sharded or least_placed_bytes(self.space, layout, placement, costs) > usable:
                    least = layout
                    if choices := self.space.sharded(layout, orders[0]):
                        least = replace(layout, shard=choices[-1][0], window=choices[-1][1])
                    if self._too_large(least, orders, placement, costs):
                        continue
                    sharded = True
                work = work_shares(placement) @ costs.work
                rest = seconds_after_pipeline(self.space, layout, placement, costs)
                bound = max(point.microbatches * float(work.max()), candidate.bound) + rest
                placed = replace(point, layout=layout)
                # Whole and split backwards have different lower bounds, so their orders are candidates of their own.
                for halves in {order.splits_backward for order in orders}:
                    chosen = tuple(order for order in orders if order.splits_backward == halves)
                    opened.append(
                        self._candidate(
                            bound, 0.0, placed, orders=chosen, costs=costs, rest=rest, sharded=sharded
                        )
                    )
        return opened

    def _splits(
        self, layout: Layout, placement: Placement, orders: Sequence[Order], microbatches: int
    ) -> Iterator[tuple[Layout, StageCosts, Sequence[Order]]]:
        """Yield a layout with each split, the stages' costs, and the schedules that have it.

        On unlike devices, the quickest split that fits depends on what a schedule holds in memory.
        """
        times, devices = self._times_of(layout), RankDevices(self.space.cluster, layout)
        few, even = _few(layout.pp, microbatches), even_counts(self.space.profile.blocks, placement.stages)
        for at, quickest in self.space.with_splits(layout, placement, times):
            if at.split != "cost":
                yield at, quickest, orders
                continue
            found: dict[tuple[int, ...], tuple[StageCosts, Sequence[Order]]] = {}
            work = microbatches * float((work_shares(placement) @ quickest.work).max())
            if devices.alike or work >= self._threshold():
                found[quickest.counts] = quickest, orders  # other splits take longer still
            for order in orders if not found else ():
                try:
                    schedule = order_of_ops(order, at.pp, min(microbatches, few))
                except ScheduleError:
                    continue  # the family does not allow the counts
                dtype = dtype_of(self.space.profile, self.space.cluster, at)
                least = next(iter(self.space.variants(at)), at)
                costs = fitting_costs(times, least, schedule, dtype, devices, quickest)
                found[costs.counts] = costs, [*found.get(costs.counts, (costs, ()))[1], order]
            for counts, (costs, those) in found.items():
                split = "even" if counts == even else "cost" if devices.alike else counts
                yield at if split == "cost" else replace(at, split=split), costs, those

    def _bound_orders(self, candidate: _Candidate) -> list[_Candidate]:
        """Bound the schedules of one placement by `lower_bound`, which they share, and estimate each."""
        point, costs, space = candidate.point, candidate.costs, self.space
        assert costs is not None, "its placement is chosen"
        layout, m, order = point.layout, point.microbatches, candidate.orders[0]
        placement = order.placement
        table = op_costs(costs, space.cluster, layout)
        work = work_shares(placement) @ costs.work
        # Few ranks, because a search bounds thousands of layouts; fewer bounds are weaker, but never wrong.
        ranks = {0, layout.pp // 2, layout.pp - 1, int(work.argmax())}
        least = float(
            lower_bound(placement, m, table, "split" if order.splits_backward else "full", ranks).makespan
        )
        bound = max(candidate.bound, least + candidate.rest)
        mean = table.seconds.mean(axis=0) * placement.stages / placement.ranks
        f, b, w = (float(mean[kind]) for kind in (Kind.F, Kind.I, Kind.W))
        setting = Setting(layout.pp, m, order.v or 1, Fraction(f), Fraction(b), Fraction(w))
        opened = []
        for order in candidate.orders:
            bubble = None if order.family is None else order.family.bubble.value(setting)
            estimate = (
                bound if bubble is None else max(bound, m * (f + b + w) + float(bubble) + candidate.rest)
            )
            number = next(self._number)
            opened.append(
                replace(
                    candidate, bound=bound, estimate=estimate, number=number, orders=(order,), bounded=True
                )
            )
        return opened

    def _too_large(
        self, layout: Layout, orders: Sequence[Order], placement: Placement, costs: StageCosts
    ) -> bool:
        """Return whether a layout exceeds the memory with any of some schedules of one placement."""
        largest = least_placed_bytes(self.space, layout, placement, costs)
        if largest <= self.space.most_bytes:
            return False
        for order in orders:
            self.rejections.add_too_large(replace(layout, schedule=order.name), largest, False)
        return True

    def _simulate(self, candidate: _Candidate) -> None:
        """Predict a layout with its schedule, with and without a sharded optimizer; keep what fits.

        If neither does, the first that fits with sharded gradients or weights is kept.
        """
        (order,) = candidate.orders
        at = replace(candidate.point.layout, schedule=order.name)
        variants = () if candidate.sharded else self.space.variants(at)
        if order.for_sharding and variants:
            if self._fits(variants[0], candidate):
                return
            variants = ()
        # Without a sharded optimizer, a layout needs more.
        if list(takewhile(lambda layout: self._try(layout, candidate), variants)):
            return
        layouts = [replace(at, shard=shard, window=window) for shard, window in self.space.sharded(at, order)]
        # A bound that holds for all of them, and then the smallest window, spare counting most of them.
        if not layouts or not self._fits(layouts[-1], candidate, bound_sharded):
            return
        for shard in dict.fromkeys(layout.shard for layout in layouts):
            *wider, smallest = (layout for layout in layouts if layout.shard == shard)
            if self._fits(smallest, candidate):
                next(layout for layout in (*wider, smallest) if self._try(layout, candidate))
                return

    def _try(self, layout: Layout, candidate: _Candidate) -> bool:
        """Predict a layout if it fits; return whether it does."""
        if not self._fits(layout, candidate):
            return False
        self._keep(self._quick_prediction(layout, candidate.point.microbatches, candidate.orders[0]))
        self.simulated += 1
        return True

    def _fits(self, layout: Layout, candidate: _Candidate, size_of: _Sizes = _fullest) -> bool:
        """Return whether a layout fits in memory by its peak or by a bound; note it if not."""
        try:
            size = self._peak_bytes(layout, candidate, size_of)
        except ScheduleError:
            return False  # the family does not allow the counts
        if size <= self.space.most_bytes:
            return True
        # Of fewer microbatches than the step has, it is a bound.
        whole = candidate.point.microbatches <= _few(layout.pp, candidate.point.microbatches) + layout.pp
        self.rejections.add_too_large(layout, size, size_of is _fullest and whole)
        return False

    def _peak_bytes(self, layout: Layout, candidate: _Candidate, size_of: _Sizes) -> float:
        """Return the bytes of the fullest device, from a step that is long enough for the schedule's steady state."""
        (order,), costs = candidate.orders, candidate.costs
        assert costs is not None, "its placement is chosen"
        microbatches = candidate.point.microbatches
        dtype = dtype_of(self.space.profile, self.space.cluster, layout)

        def peak(m: int) -> float:
            return size_of(order_of_ops(order, layout.pp, m), costs, layout, dtype, self.space.limits(layout))

        few = _few(layout.pp, microbatches)
        # Groups of an order that repeats later grow and shrink with the microbatches, and its peak with them.
        if order.family is None or order.family.repeats > 1 or microbatches <= few + layout.pp:
            return peak(microbatches)
        first = peak(few)
        if first > self.space.most_bytes:
            return first
        # Schedules without a steady state, such as gpipe, hold more with every microbatch.
        growth = max(0.0, peak(few + layout.pp) - first)
        return first + growth * ((microbatches - few) // layout.pp)

    def _quick_prediction(self, layout: Layout, microbatches: int, order: Order) -> Prediction:
        """Return a layout's prediction; of a long step, from two shorter ones, and without program and trace."""
        repeats = layout.pp if order.family is None else layout.pp * order.family.repeats
        few = _few(repeats, microbatches)
        # As many as with split backwards: F, I and W.
        ops = 3 * layout.pp * (order.v or 1) * microbatches
        if ops <= LARGE or microbatches <= few + repeats or order.family is None:
            return self._predict(layout)
        # Beyond the fill, each round of as many microbatches takes the same time.
        share = layout.dp * layout.microbatch
        first, second = (self._predict(layout, share * m) for m in (few, few + repeats))
        rounds = (microbatches - few) // repeats
        seconds = first.step_seconds + rounds * max(0.0, second.step_seconds - first.step_seconds)
        return replace(second, step_seconds=seconds, program=None, trace=None)

    def _predict(self, layout: Layout, batch: int | None = None) -> Prediction:
        space = self.space
        return predict(
            space.profile, space.cluster, layout, sequence=space.sequence, batch=batch or space.batch
        )


def _needed(space: Space, plan: Prediction) -> float:
    """Return the bytes of the fullest device, as if it were one of the first group."""
    return plan.peak_bytes / (plan.capacity / space.most_bytes)


def _few(repeats: int, microbatches: int) -> int:
    """Return the microbatches after which a schedule repeats itself, with the same remainder as the step's."""
    return STEADY * repeats + microbatches % repeats


def smallest_layout(space: Space, rejections: Rejections) -> Smallest | None:
    """Return, of the layouts that do not fit, the one that needs the least memory; None if all fit.

    Layouts with the least bounds are predicted in full, since their bounds leave out what the schedule keeps.
    """
    known = rejections.smallest
    for bound, layout in rejections.least_bounds():
        if known is not None and known.exact and bound >= known.size:
            break
        try:
            plan = predict(space.profile, space.cluster, layout, sequence=space.sequence, batch=space.batch)
        except PenstockError:
            continue  # the schedule does not allow the counts
        if known is None or not known.exact or _needed(space, plan) < known.size:
            known = Smallest(plan.layout, _needed(space, plan), True)
    return known
