"""Space of layouts that a search covers: degrees, microbatches, schedules, and what may be saved or divided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.counts import plural, require_count
from penstock.base.errors import ConfigError, ScheduleCodeError, ScheduleError
from penstock.plan.cluster import Cluster, common_dtypes
from penstock.plan.prediction import family_schedule, step_program
from penstock.plan.rank_devices import RankDevices, why_not_planned
from penstock.plan.run_layout import Layout, Recompute, require_key
from penstock.plan.stage_costs import LayerTimes, StageCosts, attention_of, dtype_of, even_counts, stage_costs
from penstock.profile.closed_form import require_divisible
from penstock.profile.model_profile import Profile
from penstock.profile.selective import OUTPUTS, modules_of
from penstock.schedule.families import FAMILIES, CatalogueFamily, require_family
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.residency import Shard
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import is_csv, read_csv

MAX_MICROBATCH = 32
MAX_VIRTUAL_STAGES = 12
LEAST_PART = 4096
"""Tokens of a sample that each of `cp` devices has at least: cp > 1 is tried from 8,192 tokens on, as Megatron-LM advises.

Shorter parts save little memory, which recompute saves as well, and the search would bound more layouts for nothing.
"""
# Ranks that hold all stages have the weights of a replica each, and replicas send each other no activations.
_ON_ALL_RANKS = tuple(name for name, family in FAMILIES.items() if family.on_all_ranks)
_USUAL = tuple(name for name, family in FAMILIES.items() if not family.searches and name not in _ON_ALL_RANKS)


@dataclass(frozen=True)
class Point:
    """A layout but for its schedule."""

    layout: Layout
    microbatches: int


@dataclass(frozen=True)
class Order:
    """A schedule family with its number of stages per rank."""

    family: CatalogueFamily | None  # None for the user's own and for a CSV file
    name: str  # of the family, or path of the CSV file
    # Stages per rank; None for a CSV file, and for the user's own if ranks have different numbers.
    v: int | None
    placement: Placement
    splits_backward: bool
    # Whether only sharded weights make it any better than another order.
    for_sharding: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Space:
    """Layouts to search."""

    profile: Profile
    cluster: Cluster
    # Tokens of a sample, samples of a step.
    sequence: int
    batch: int
    devices: int
    fixed: Mapping[str, Any]
    schedules: Sequence[str]  # families of the catalogue or the user's own, or paths of CSV files
    # Whether gradients and weights are sharded where that alone makes a layout fit. If reductions do not overlap, nothing
    # hides that traffic, so a search tries it only if no other layout fits.
    shards: bool = True

    @property
    def most_bytes(self) -> float:
        """Bytes that a layout may use of a device of the first group."""
        return self.cluster.device.usable

    def limits(self, layout: Layout) -> npt.NDArray[np.float64]:
        """Return the bytes of pipeline ranks' devices over `most_bytes`, shape (ranks,)."""
        return RankDevices(self.cluster, layout).usable / self.most_bytes

    def points(self) -> Iterator[Point]:
        """Yield every layout but for its schedule."""
        keys = ("reduce_every", "attention", "overlap", "dtype")
        given: dict[str, Any] = {key: self.fixed.get(key) for key in keys}
        given["store"] = self.fixed.get("store", "none")
        for pp, dp, tp, cp in self._degrees():
            share = self.batch // dp
            for microbatch in self._values("microbatch", divisors(share, MAX_MICROBATCH)):
                if share % microbatch:
                    continue
                choices = product(
                    self._values("ep", self._expert_degrees(dp * cp * tp)),
                    self._values("recompute", self._recomputes()),
                    self._values("sequence_parallel", self._sequence_parallel(tp, cp)),
                    # With two places a stage comes from a store while another one runs.
                    self._values("window", (None, 2, 1) if self.stored else (None,)),
                )
                for ep, recompute, sequence_parallel, window in choices:
                    if dp * cp * tp % ep or (
                        dp * cp == 1 and self.fixed.get("shard") in ("gradients", "weights")
                    ):
                        continue
                    if tp > 1 and ep == 1 and self._experts:
                        continue  # each device would compute all experts of the same tokens
                    # `shard` and `split` are chosen last; see `variants`, `sharded` and `splits`.
                    layout = Layout(
                        pp=pp,
                        dp=dp,
                        tp=tp,
                        ep=ep,
                        cp=cp,
                        microbatch=microbatch,
                        recompute=recompute,
                        shard=self.fixed.get("shard", "optimizer" if dp * cp > 1 else "none"),
                        sequence_parallel=sequence_parallel,
                        window=window,
                        split=self.splits[0],
                        imbalance=self.fixed.get("imbalance", 1.0),
                        chunked_loss=self.fixed.get("chunked_loss", False),
                        optimizer=self.fixed.get("optimizer", "adamw"),
                        **given,
                    )
                    yield Point(layout, share // microbatch)

    @property
    def splits(self) -> tuple[str | tuple[int, ...], ...]:
        """Splits of the blocks."""
        return (self.fixed["split"],) if "split" in self.fixed else ("cost", "even")

    def with_splits(
        self, layout: Layout, placement: Placement, times: LayerTimes
    ) -> Iterator[tuple[Layout, StageCosts]]:
        """Yield a layout with each different split that fits its stages, and the stages' costs."""
        even = even_counts(self.profile.blocks, placement.stages)
        counts: set[tuple[int, ...]] = set()
        for split in self.splits:
            if split == "even" and even in counts:
                continue
            at = replace(layout, split=split)
            try:
                costs = stage_costs(times, at, placement)
            except ConfigError:
                continue
            counts.add(costs.counts)
            yield at, costs

    def variants(self, layout: Layout) -> tuple[Layout, ...]:
        """Return a layout with a sharded optimizer, which needs less memory, and without, which need not gather weights."""
        if layout.replicas == 1 or self.fixed.get("shard") in ("none", "optimizer"):
            return (layout,)
        if "shard" in self.fixed:
            return ()
        return (replace(layout, shard="optimizer"), replace(layout, shard="none"))

    def sharded(self, layout: Layout, order: Order) -> tuple[tuple[Shard, int | None], ...]:
        """Return what else replicas may divide, with the window: the quickest first, and last what needs the least memory.

        These need more traffic than `variants`, so a search tries them only where none of these fits. Sharded weights save
        memory on ranks with several stages. Windows are powers of two.
        """
        shard = self.fixed.get("shard")
        stages = max(map(len, order.placement.stages_of))
        if not self.may_shard(layout) or order.placement.has_copies or (shard is None and stages == 1):
            return ()
        windows: list[int | None] = [2**n for n in reversed(range((stages - 1).bit_length()))]
        if shard is not None:
            windows = [self.fixed["window"]] if "window" in self.fixed else [None, *windows]
        weights: list[tuple[Shard, int | None]] = [("weights", k) for k in windows]
        every = weights if order.for_sharding else [("gradients", None), *weights]
        return tuple(each for each in every if shard in (None, each[0]))

    def may_shard(self, layout: Layout) -> bool:
        """Return whether gradients and weights of a layout may be sharded."""
        return self.shards and layout.replicas > 1 and layout.ep == 1

    def orders(self, pp: int, microbatches: int) -> tuple[Order, ...]:
        """Return the schedules that may run on `pp` ranks."""
        files = [self._file(name) for name in self.schedules if is_csv(name)]
        in_files = [order for *counts, order in files if counts == [pp, microbatches]]
        return (*self._orders_of_families(pp), *self._own_orders(pp, microbatches), *in_files)

    @lru_cache(maxsize=4096)  # noqa: B019  a space lives as long as its search
    def _own_orders(self, pp: int, microbatches: int) -> tuple[Order, ...]:
        """Return the orders that the user's families build for these counts; counts that they refuse are skipped."""
        orders = []
        for name in self.schedules:
            if is_csv(name) or name in FAMILIES:
                continue
            family = require_family(name)
            choices: list[int | None] = [self.fixed.get("v")]
            if family.chooses_virtual_stages and choices == [None]:
                most = min(self.profile.blocks // pp, MAX_VIRTUAL_STAGES)
                choices = [v for v in range(1, most + 1) if not self.profile.blocks // pp % v]
            for v in choices:
                try:
                    family.build(pp, microbatches, v)
                except ScheduleCodeError:
                    raise
                except ScheduleError:
                    continue
                schedule = step_program(name, pp, microbatches, v).schedule
                if schedule.stages <= self.profile.blocks:
                    held = None if schedule.stages % pp else schedule.stages // pp
                    splits = bool((schedule.kind == Kind.W).any())
                    orders.append(Order(None, name, held, schedule.placement, splits))
        return tuple(orders)

    @lru_cache(maxsize=256)  # noqa: B019  a space lives as long as its search
    def _file(self, path: str) -> tuple[int, int, Order]:
        """Return the ranks and microbatches of a schedule in a CSV file, and its order."""
        schedule = read_csv(path)
        splits = bool((schedule.kind == Kind.W).any())
        return schedule.ranks, schedule.microbatches, Order(None, path, None, schedule.placement, splits)

    @lru_cache(maxsize=4096)  # noqa: B019  a space lives as long as its search
    def copies(self, pp: int, microbatches: int) -> int:
        """Return the largest number of ranks that have a copy of one stage, over the schedules."""
        placements = {order.placement for order in self.orders(pp, microbatches)}
        return max((len(ranks) for place in placements for ranks in place.holders), default=1)

    @lru_cache(maxsize=256)  # noqa: B019  a space lives as long as its search
    def _orders_of_families(self, pp: int) -> tuple[Order, ...]:
        return tuple(self._each_order(pp))

    def _each_order(self, pp: int) -> Iterator[Order]:
        fixed_v = self.fixed.get("v")
        # With a store, the more stages a rank has, the fewer weights are on its device.
        most = self.profile.blocks // pp
        most = most if self.stored else min(most, MAX_VIRTUAL_STAGES)
        name = Layout.schedule
        alone = pp == 1 and name in self.schedules and fixed_v in (None, 1) and not self.stored
        if alone:
            # One rank waits for no other, so all orders need the same time but for what hides reductions, and one microbatch
            # at a time needs least memory. But a rank with several stages need not hold all of their weights.
            yield Order(FAMILIES[name], name, 1, Placement.loop(1), False)
            if fixed_v == 1 or not self.shards or self.devices == 1:
                return
        for name in self.schedules:
            family = FAMILIES.get(name)
            if family is None or (alone and (family.splits_backward or not family.chooses_virtual_stages)):
                continue
            if family.chooses_virtual_stages:
                choices = [
                    v
                    for v in range(max(family.least_virtual_stages, 1 + alone), most + 1)
                    if not self.profile.blocks // pp % v
                ]
                if fixed_v is not None:
                    choices = [fixed_v]
            else:
                choices = [family.virtual_stages] if fixed_v in (None, family.virtual_stages) else []
            for v in choices:
                try:
                    placement = family.place(pp, v)
                except ScheduleError:
                    continue  # the family does not allow so many ranks
                if placement.stages <= self.profile.blocks:
                    yield Order(family, name, v, placement, family.splits_backward, alone)

    @property
    def stored(self) -> bool:
        """True if weights are in a store."""
        return bool(self.fixed.get("store", "none") != "none")

    def with_store(self) -> Space | None:
        """Return the space of one pipeline over all devices with weights in host memory; None if it is not allowed."""
        if (
            why_not_planned(self.profile, self.cluster, "host")
            or self.fixed.keys() & {"store", "shard"}
            or self.fixed.get("pp", self.devices) != self.devices
        ):
            return None
        fixed = {**self.fixed, "pp": self.devices, "store": "host"}
        space = replace(self, fixed=fixed, shards=False)
        return None if next(space.points(), None) is None else space

    def _degrees(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield every (pp, dp, tp, cp)."""
        per_node = gcd(*(group.ranks_per_node for group in self.cluster.groups))
        shape = self.profile.shape
        for tp in self._values("tp", [t for t in divisors(per_node) if self.devices % t == 0]):
            divides = shape is None or not any(n % tp for n in (shape.heads, shape.kv_heads, shape.ffn))
            whole = shape is None or shape.is_whole  # its matrices are not divided
            if self.devices % tp or not divides or (whole and tp > 1):
                continue
            rest = self.devices // tp
            for cp, pp in product(self._context_degrees(rest), self._values("pp", divisors(rest))):
                if rest % (cp * pp) or pp > self.profile.blocks:
                    continue
                dp = rest // (cp * pp)
                if self.cluster.ranks(dp * cp * tp) < pp:
                    continue
                if self.stored and dp * cp * tp > 1:
                    continue
                if self.fixed.get("dp", dp) == dp and self.batch % dp == 0:
                    yield pp, dp, tp, cp

    def _context_degrees(self, devices: int) -> Sequence[int]:
        """Return the numbers of devices that may divide samples."""
        if self.profile.shape is None:
            return self._values("cp", [1])
        most = max(1, self.sequence // LEAST_PART)
        return self._values(
            "cp", [cp for cp in divisors(devices, most) if cp == 1 or self.sequence % (2 * cp) == 0]
        )

    def _expert_degrees(self, devices: int) -> list[int]:
        """Return the numbers of devices that can divide the experts of a stage on so many."""
        return divisors(gcd(devices, self._experts)) if self._experts else [1]

    @property
    def _experts(self) -> int:
        return 0 if self.profile.shape is None else self.profile.shape.experts

    def _recomputes(self) -> tuple[Recompute, ...]:
        unfused = (
            attention_of(self.profile, self.cluster, Layout(attention=self.fixed.get("attention")))
            == "unfused"
        )
        usual: tuple[Recompute, ...] = ("none", "selective", 2, "full") if unfused else ("none", 2, "full")
        if (modules := self.modules) and unfused:
            modules = f"{modules}+core_attn"
        return (*usual, modules) if modules else usual

    @property
    def modules(self) -> str:
        """Modules that are recomputed together, of a model with experts or latent attention."""
        shape = self.profile.shape
        if shape is None or shape.adapter_rank or not (shape.experts or shape.kv_rank):
            return ""
        return "+".join(name for name in OUTPUTS if name in modules_of(shape))

    def _sequence_parallel(self, tp: int, cp: int) -> tuple[bool, ...]:
        # `Pipeline` refuses it beside cp, which divides the same tokens.
        divides = tp > 1 and cp == 1 and self.sequence % tp == 0 and not self._experts
        return (True, False) if divides else (False,)

    def _values(self, key: str, default: Sequence[Any]) -> Sequence[Any]:
        return (self.fixed[key],) if key in self.fixed else default


def order_of_ops(order: Order, ranks: int, microbatches: int) -> Schedule:
    """Return a schedule that is not yet proven, which is enough to count its memory."""
    if order.family is None:
        return step_program(order.name, ranks, microbatches, order.v).schedule
    return family_schedule(order.name, ranks, microbatches, order.v)


def make_space(
    profile: Profile,
    cluster: Cluster,
    *,
    sequence: int,
    batch: int,
    fixed: Mapping[str, Any],
    schedules: Sequence[str] | None,
    devices: int | None,
) -> Space:
    """Check the inputs of a search and return its space."""
    for key, value in fixed.items():
        require_key(key, value)
    Layout(**{key: value for key, value in fixed.items() if key != "schedule"})
    if profile.shape is not None:
        # With ep left open, a degree that divides the experts is chosen.
        require_divisible(profile.shape, fixed.get("tp", 1), fixed.get("ep", max(1, profile.shape.experts)))
    if "schedule" in fixed:
        schedules = [fixed["schedule"]]
    names = list(_USUAL if schedules is None else schedules)
    if not names:
        raise ConfigError(f"a search needs at least one schedule; there are {', '.join(FAMILIES)}")
    for name in names:
        if not is_csv(name):
            require_family(name)
    count = cluster.devices if devices is None else devices
    if not 1 <= count <= cluster.devices:
        raise ConfigError(
            f"devices must be 1 to {cluster.devices}, the number that {cluster.name} has, got {count}"
        )
    for what, value in (("batch", batch), ("sequence", sequence)):
        require_count(what, value)
    space = Space(
        profile=profile,
        cluster=cluster,
        sequence=sequence,
        batch=batch,
        devices=count,
        fixed=dict(fixed),
        schedules=names,
        shards=fixed.get("shard") not in ("none", "optimizer")
        and ("shard" in fixed or fixed.get("overlap", cluster.overlap)),
    )
    if next(space.points(), None) is None:
        raise ConfigError(_why_empty(space))
    if not any(is_csv(name) or name in FAMILIES for name in names):
        _require_own_order(space)
    return space


def not_compared(space: Space) -> tuple[str, ...]:
    """Return what a search left out, each with the value that asks for it."""
    profile, cluster, fixed = space.profile, space.cluster, space.fixed
    found = []
    if profile.shape is not None:
        at = Layout(dtype=fixed.get("dtype"), attention=fixed.get("attention"))
        ours = dtype_of(profile, cluster, at)
        if "dtype" not in fixed:
            found += [f"dtype={dtype}" for dtype in common_dtypes(cluster.groups) if dtype != ours]
        if "attention" not in fixed:
            unfused = attention_of(profile, cluster, at) == "unfused"
            found.append(f"attention={'fused' if unfused else 'unfused'}")
    else:
        found.append(f"tp above 1 (the profile of {profile.name} is for tp=1)")
    if "chunked_loss" not in fixed and profile.shape is not None:
        found.append("chunked_loss=true")
    if "overlap" not in fixed:
        found.append(f"overlap={'false' if cluster.overlap else 'true'}")
    shape = profile.shape
    if len(cluster.groups) > 1:
        found.append("replicas of the pipeline on unlike groups, which would share a batch by their speeds")
    across = 2 * cluster.ranks_per_node
    sizes = () if shape is None or shape.is_whole else (shape.heads, shape.kv_heads, shape.ffn)
    if (
        sizes
        and len(cluster.groups) == 1
        and not any(size % across for size in sizes)
        and "tp" not in fixed
        and space.devices % across == 0
    ):
        found.append(f"tp across nodes, as tp={across}")
    if shape is not None and "cp" not in fixed and space.sequence < 2 * LEAST_PART:
        found.append(f"cp above 1 (samples are shorter than {2 * LEAST_PART:,} tokens)")
    if "store" not in fixed:
        found.append("store=host and store=disk where another layout fits")
    if "shard" not in fixed and "store" not in fixed and space.devices > 1:
        where = (
            "where shard=optimizer fits"
            if space.shards
            else "(nothing hides their traffic with overlap=false)"
        )
        found += [f"shard=gradients and shard=weights {where}", "reduce_every"]
        found += ["window=3 and others"] if space.shards else []
    if "v" not in fixed and profile.blocks > MAX_VIRTUAL_STAGES and not space.stored:
        found.append(f"v above {MAX_VIRTUAL_STAGES}")
    if "microbatch" not in fixed and space.batch > MAX_MICROBATCH:
        found.append(f"microbatch above {MAX_MICROBATCH}")
    if "recompute" not in fixed:
        others = ", and of other modules" if space.modules else ""
        found.append(f"recompute=3 and more{others}")
    if "split" not in fixed:
        found.append("split by numbers")
    if "schedule" not in fixed:
        left = [name for name in _USUAL if name not in space.schedules]
        found += [f"{plural(len(left), 'schedule')} that --schedule leaves out"] if left else []
        found += [f"schedule={name}" for name in _ON_ALL_RANKS if name not in space.schedules]
    return (*found, "orders that are searched (--search-orders)")


def _require_own_order(space: Space) -> None:
    """Raise unless one of the user's families allows the counts of some layout; they are the only ones to search."""
    if any(space.orders(point.layout.pp, point.microbatches) for point in space.points()):
        return
    point, family = next(space.points()), require_family(space.schedules[0])
    schedule = family.build(point.layout.pp, point.microbatches, space.fixed.get("v"))
    raise ConfigError(
        f"{family.name} has {schedule.stages} stages with pp={point.layout.pp}, and {space.profile.name} has "
        f"{space.profile.blocks} blocks; search other schedules, too"
    )


def _why_empty(space: Space) -> str:
    """Return the reason why a space has no layout, with the nearest batch if another batch would do."""
    given = ", ".join(f"{key}={value}" for key, value in space.fixed.items())
    on = f"{space.devices} devices" + (f" with {given}" if given else "")

    def allows(batch: int) -> bool:
        return next(replace(space, batch=batch).points(), None) is not None

    # Every multiple of devices x microbatch divides over all numbers of replicas, so there is one in reach.
    reach = 64 * space.devices * int(space.fixed.get("microbatch", 1))
    below = next((n for n in range(space.batch - 1, max(0, space.batch - reach), -1) if allows(n)), None)
    above = next((n for n in range(space.batch + 1, space.batch + reach) if allows(n)), None)
    near = " or ".join(str(n) for n in (below, above) if n is not None)
    shard = space.fixed.get("shard")
    if not near and shard in ("gradients", "weights"):
        return (
            f"shard={shard} divides {shard} over replicas (dp x cp of them), and no layout of {space.profile.name} has "
            f"two on {plural(space.devices, 'device')} with the values given; leave out shard, or take more devices"
        )
    if near:
        return f"a batch of {space.batch} does not divide over {on}; the nearest batch that does is {near}"
    experts = ", and ep must divide dp x cp x tp" if space.fixed.get("ep", 1) > 1 else ""
    return (
        f"{space.profile.name} cannot run on {on}: pp x dp x cp x tp must be the devices, pp at most its "
        f"{space.profile.blocks} blocks, and tp must divide its heads and the devices of a node"
        f"{experts}; fix other values"
    )


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a number up to a limit, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    every = sorted({*small, *(number // n for n in small)})
    return [n for n in every if most is None or n <= most]
