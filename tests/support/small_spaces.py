"""Small spaces of layouts, in which a search can be compared with all layouts one by one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from penstock.base.errors import PenstockError
from penstock.plan.cluster import Cluster, Device, LinkSpeed
from penstock.plan.explore.search_space import Space, make_space
from penstock.plan.prediction import Prediction, predict
from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import Profile, of_shape
from penstock.profile.model_shape import ModelShape


@dataclass(frozen=True)
class SmallSpace:
    """Inputs of a search."""

    profile: Profile
    cluster: Cluster
    sequence: int
    batch: int
    fixed: dict[str, Any]

    @property
    def space(self) -> Space:
        return make_space(
            self.profile,
            self.cluster,
            sequence=self.sequence,
            batch=self.batch,
            fixed=self.fixed,
            schedules=None,
            devices=None,
        )


def small_space(seed: int) -> SmallSpace:
    """Return a small space: 2 to 8 devices, 2 to 8 blocks; every third has little memory."""
    draw = random.Random(seed)
    devices = draw.choice((2, 3, 4, 4, 6, 8))
    heads = draw.choice((2, 4))
    shape = ModelShape(
        name="small", layers=draw.randint(2, 8), hidden=64 * heads, heads=heads, kv_heads=heads, head_size=64,
        ffn=draw.choice((256, 1024)), vocabulary=draw.choice((128, 4096)), gated=draw.random() < 0.5,
        dropout=draw.random() < 0.5,
    )  # fmt: skip
    rates = {"bf16": draw.choice((1e11, 1e12))}
    device = Device(
        memory=80e9, reserve=0.0, matmul=rates, memory_bandwidth=draw.choice((5e9, 5e10)), matmul_width=64,
        launch=draw.choice((0, 1e-5)),
    )  # fmt: skip
    nodes = draw.choice((1, 2)) if devices % 2 == 0 else 1
    cluster = Cluster(
        name="small",
        device=device,
        ranks_per_node=devices // nodes,
        nodes=nodes,
        node=LinkSpeed(1e-6, draw.choice((1e9, 1e10))),
        network=LinkSpeed(1e-5, draw.choice((2e8, 2e9))),
        op_overhead=draw.choice((0, 5e-5)),
        step_overhead=1e-4,
        overlap=draw.random() < 0.5,
        unfused_dropout=draw.random() < 0.5,
    )
    fixed = {"tp": 1} if draw.random() < 0.5 else {}
    space = SmallSpace(
        of_shape(shape), cluster, draw.choice((64, 128)), devices * draw.choice((1, 2, 3)), fixed
    )
    if seed % 3:
        return space
    sizes = sorted(plan.peak_bytes for plan in every_plan(space))
    cap = sizes[len(sizes) // draw.choice((4, 20))]
    return replace(space, cluster=replace(cluster, device=replace(device, memory=cap)))


def every_plan(small: SmallSpace, schedules: Sequence[str] | None = None) -> list[Prediction]:
    """Return the predictions of all layouts of a space, one by one, without bounds; also those that do not fit."""
    space = small.space if schedules is None else replace(small.space, schedules=schedules)
    plans = _plans_of(small, space)
    if not small.space.shards and not any(plan.fits for plan in plans):
        plans += _plans_of(small, replace(small.space, shards=True))
    return plans


def _plans_of(small: SmallSpace, space: Space) -> list[Prediction]:
    plans = []
    for point in space.points():
        for order, split in product(space.orders(point.layout.pp, point.microbatches), space.splits):
            at = replace(point.layout, v=order.v, schedule=order.name, split=split)
            found = _predictions(small, space.variants(at))
            if not any(plan.fits for plan in found):
                choices = space.sharded(at, order)
                tried = _predictions(small, [replace(at, shard=shard, window=k) for shard, k in choices])
                found += [plan for plan in tried if plan.fits][:1] or tried
            elif order.for_sharding:
                found = []
            # An even split by cost comes again.
            again = split == "cost" and "even" in space.splits
            plans += [plan for plan in found if not (again and plan.layout.split == "even")]
    return plans


def _predictions(small: SmallSpace, layouts: Iterable[Layout]) -> list[Prediction]:
    """Return the predictions of layouts, without those whose family does not allow the counts."""
    plans = []
    for layout in layouts:
        try:
            plans.append(
                predict(small.profile, small.cluster, layout, sequence=small.sequence, batch=small.batch)
            )
        except PenstockError:
            continue
    return plans
