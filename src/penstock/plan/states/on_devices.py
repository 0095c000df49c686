"""Weights, gradients and optimizer's state on the devices, whole or divided over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.plan.cluster import Cluster
from penstock.plan.rank_devices import RankDevices
from penstock.plan.stage_costs import StageCosts, Table, collective_seconds, rank_parameters
from penstock.plan.states.states import (
    Counts,
    SimulatedStep,
    States,
    StoreRoom,
    earlier_reductions,
    most_holders,
    overlaps,
    residency_of,
)
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.simulate.reduction import reduce_gradients
from penstock.trace.bubbles import makespan
from penstock.trace.events import Trace

# About the 25 MiB of `penstock.parallel.replicas.layout`, which imports torch.
BUCKET_BYTES = 25_000_000
"""Bytes of a bucket of gradients in flight."""
MAX_BUCKETS = 16


class OnDevices(States):
    """States on the devices, which exchange gradients, and with shards weights, over their links."""

    def device_bytes(self, counts: Counts) -> Any:
        """Return the bytes on one device of so many parameters, before the first backward.

        Of sharded weights they are the device's share, and of sharded gradients nothing.
        """
        sharding = self.layout.sharding
        always = self.weight / self.layout.replicas if sharding.shard == "weights" else self.weight
        always += 0 if sharding.comes_and_goes else self.gradient
        return counts[0] * always + self.optimizer_bytes(counts)

    def on_device(self, size: Any) -> Any:
        return size

    def moving_weights(self, costs: StageCosts) -> Table:
        # Frozen ones are not divided.
        return self.weight * costs.parameters

    def moves(self, step: SimulatedStep) -> float:
        """Return the seconds by which gathers of weights, and reductions before a stage's last, lengthen the step.

        A stage's last reduction is priced as with shard="optimizer": its all-reduce is a reduce-scatter and the gather of
        the updated weights, which with sharded weights is the stage's first gather. Each further stay of weights on a rank
        takes an all-gather of the stage's weights, and each earlier reduction a reduce-scatter of its gradients.

        With overlapping reductions, they are simulated beside the ops. Otherwise all of it is exposed.
        """
        sharding, costs, cluster = self.layout.sharding, step.costs, step.cluster
        if not sharding.comes_and_goes:
            return 0.0
        residency = residency_of(step.program.schedule, sharding)
        gathers, sums = (
            self._replica_seconds(unit, size * costs.counts_of_parameters, cluster, 1, costs.ranks)
            for unit, size in (("all_gather", self.weight), ("reduce_scatter", self.gradient))
        )
        earlier = earlier_reductions(residency)
        if overlaps(cluster, self.layout):
            moving = replace(residency, reductions=earlier)
            # The gather before the first op is counted by `_first_gather`, too.
            twice = self._first_gather(costs, cluster, 1)
            return max(0.0, step.lengthened(self.layout, moving, gathers, sums) - twice)
        delays = []
        for runs, reductions in zip(residency.runs, earlier, strict=True):
            stays = [run.stage for run in runs]
            again = float(gathers[stays].sum() - gathers[list(set(stays))].sum()) if stays else 0.0
            delays.append(again + float(sum(sums[stage] for _, stage in reductions)))
        return max(delays)

    def reduction(self, step: SimulatedStep) -> tuple[float, Trace]:
        program, trace, costs, cluster = step.program, step.trace, step.costs, step.cluster
        holders = most_holders(program.schedule.placement)
        if self.layout.replicas * holders == 1 or not overlaps(cluster, self.layout):
            return super().reduction(step)
        held = self.gradient * costs.counts_of_parameters
        seconds = self._replica_seconds("all_reduce", held, cluster, holders, costs.ranks)
        buckets = {s: int(min(MAX_BUCKETS, max(1, n // BUCKET_BYTES))) for s, n in enumerate(held[0])}
        reductions = reduce_gradients(program, trace, seconds.tolist(), buckets)
        ends = float(reductions.trace.end.max())
        exposed = max(0.0, ends - float(makespan(trace)) - float(trace.start.min()))
        return exposed + self._first_gather(costs, cluster, holders), reductions.trace

    def reduction_after(self, costs: StageCosts, cluster: Cluster, placement: Placement) -> float:
        """Return the seconds to reduce the gradients after the backward, on the rank that they take longest."""
        holders = most_holders(placement)
        if self.layout.replicas * holders == 1:
            return 0.0
        held = rank_parameters(costs, placement) * self.gradient
        seconds = self._replica_seconds("all_reduce", held, cluster, holders)
        return float(seconds.max()) + self._first_gather(costs, cluster, holders)

    def update_rate(self, cluster: Cluster) -> Any:
        return RankDevices(cluster, self.layout).each(
            lambda group: group.device.optimizer_bandwidth or group.device.memory_bandwidth
        )

    def sentences(self, schedule: Schedule, cluster: Cluster, room: StoreRoom) -> tuple[str, ...]:
        layout = self.layout
        if layout.shard != "none" and layout.replicas == 1:
            return (
                f"shard={layout.shard} changes nothing: replicas divide it (dp x cp of them), and this layout has one.",
            )
        if not layout.sharding.comes_and_goes:
            return ()
        return (f"Over {layout.replicas} replicas, {residency_of(schedule, layout.sharding).summary()}.",)

    def _first_gather(self, costs: StageCosts, cluster: Cluster, holders: int) -> float:
        """Return the seconds to gather the first layer's weights (ZeRO); the rest is gathered while the next step runs."""
        if self.layout.sharding.shard == "none":
            return 0.0
        of_layer = self.weight * costs.counts_of_parameters / np.maximum(1, costs.counts)
        return float(self._replica_seconds("all_gather", of_layer, cluster, holders, costs.ranks).max())

    def _replica_seconds(
        self, unit: str, held: Table, cluster: Cluster, holders: int, ranks: Sequence[int] | None = None
    ) -> Table:
        """Return the seconds of collectives among replicas.

        Args:
            held: bytes, and those of experts, which are for replicas with the same experts, shape (2 or more, ranks).
            ranks: ranks that have these bytes, such as those of the stages (default: all of them once).
        """
        size, of_experts, *_ = held

        def seconds(group: Cluster) -> Table:
            rest = self._group_seconds(unit, size - of_experts, group, holders)
            if not np.any(of_experts):
                return rest
            experts = self._group_seconds(unit, of_experts, group, holders, experts=True)
            return rest + np.where(of_experts > 0, experts, 0.0)

        return RankDevices(cluster, self.layout).each(seconds, ranks)

    def _group_seconds(
        self, unit: str, size: Table, cluster: Cluster, holders: int, *, experts: bool = False
    ) -> Table:
        layout = self.layout
        # Replicas are so many ranks apart.
        replicas, apart = (layout.expert_replicas, layout.ep) if experts else (layout.replicas, layout.tp)
        span = layout.devices if holders > 1 else layout.replicas * layout.tp
        link = cluster.ring(replicas, apart, within=span <= cluster.ranks_per_node, reduces=True)
        return np.asarray(collective_seconds(unit, size, replicas * holders, link))
