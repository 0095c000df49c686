"""Weights, gradients and optimizer's state in host memory or on disk, while no op needs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from penstock.plan.cluster import Cluster
from penstock.plan.stage_costs import StageCosts, Table, rank_parameters
from penstock.plan.states.states import (
    Counts,
    SimulatedStep,
    States,
    StoreRoom,
    earlier_reductions,
    most_holders,
    residency_of,
)
from penstock.profile.closed_form import MAIN_BYTES
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.show.units import size_text


class InStore(States):
    """States in a store, to which ranks have links; see `penstock.parallel.host_store`."""

    no_interval = "steps with a store were compared with simulated ones on slowed links alone"

    def device_bytes(self, counts: Counts) -> Any:
        return 0 * counts[0]

    def on_device(self, size: Any) -> Any:
        return 0 * size

    def moving_weights(self, costs: StageCosts) -> Table:
        return self.weight * costs.parameters + costs.frozen_bytes

    def moves(self, step: SimulatedStep) -> float:
        """Return the seconds by which copies lengthen a step, beside whose ops they are simulated.

        Each stay of weights on a rank takes a copy, and each reduction. Before a stage's later backwards the sums that have
        left come back, which these wait for.
        """
        schedule, costs = step.program.schedule, step.costs
        residency = residency_of(schedule, self.layout.sharding)
        rate = self._link_rate(step.cluster)
        fetch, send = self.moving_weights(costs) / rate, self.gradient * costs.parameters / rate
        beside, waits = [], []
        for all_, earlier in zip(residency.reductions, earlier_reductions(residency), strict=True):
            # The next op adds to the sums that are still on their way.
            at_once = {row for row, stage in earlier if schedule.stage[row + 1] == stage}
            beside.append(tuple(each for each in all_ if each[0] not in at_once))
            waits.append(float(sum(send[stage] * (1 + (row in at_once)) for row, stage in earlier)))
        moving = replace(residency, reductions=tuple(beside))
        return step.lengthened(self.layout, moving, fetch, send) + max(waits)

    def reduction_after(self, costs: StageCosts, cluster: Cluster, placement: Placement) -> float:
        """Return the seconds in which holders of the same stages send each other gradients at home, and add them up."""
        if (holders := most_holders(placement)) == 1:
            return 0.0
        held = self.gradient * float(rank_parameters(costs, placement)[0].max())
        # Of each holder's gradients: they are read and written as a message, and read again to be added to a sum.
        at_home = 3 * holders * held / (cluster.host.memory_bandwidth / self._ranks_of_host(cluster))
        far = max(0, holders - self._ranks_of_host(cluster))
        return at_home + far * held / cluster.network.bandwidth

    @property
    def update_bytes(self) -> int:
        # Those of main weights are read and written in memory.
        return super().update_bytes - (2 * MAIN_BYTES[self.dtype] if self.layout.store == "disk" else 0)

    def update_rate(self, cluster: Cluster) -> Any:
        host = cluster.host
        shared = host.disk_bandwidth if self.layout.store == "disk" else host.memory_bandwidth
        return shared / self._ranks_of_host(cluster)

    def store_room(self, schedule: Schedule, costs: StageCosts, cluster: Cluster) -> StoreRoom:
        """Return the bytes in a store; the process of each rank has its own."""
        counts = rank_parameters(costs, schedule.placement)
        moving = self.moving_weights(costs)
        weights = np.array([moving[list(stages)].sum() for stages in schedule.placement.stages_of])
        kept = weights + self.gradient * counts[0] + self.optimizer_bytes(counts)
        # Main weights are kept by `PipelineOptimizer`, in host memory.
        main = MAIN_BYTES[self.dtype] * counts[0] if self.layout.store == "disk" else kept
        devices = self._ranks_of_host(cluster)
        of_host, in_memory = (
            max(float(each[first : first + devices].sum()) for first in range(0, self.layout.pp, devices))
            for each in (kept, main)
        )
        return StoreRoom(in_memory, of_host - in_memory)

    def sentences(self, schedule: Schedule, cluster: Cluster, room: StoreRoom) -> tuple[str, ...]:
        told = f"The memory of a host must have room for {size_text(room.memory)}"
        if self.layout.store == "disk":
            beside = f", and its memory for {size_text(room.memory)} of main weights" if room.memory else ""
            told = f"The disks of a host must have room for {size_text(room.disk)}{beside}"
        text, rate = residency_of(schedule, self.layout.sharding).summary(), self._link_rate(cluster)
        return (
            f"{told}; a device copies {rate / 1e9:.3g} GB/s each way ({text}), and CPUs update the weights.",
        )

    def _link_rate(self, cluster: Cluster) -> float:
        return cluster.host.fetch_rate(self.layout.store, self._ranks_of_host(cluster))

    def _ranks_of_host(self, cluster: Cluster) -> int:
        """Return the number of the pipeline's ranks that share a host's memory and disks."""
        return min(self.layout.pp, cluster.ranks_per_node)
