"""Prediction of a step: its time, memory and idle time, from a profile, a cluster and a layout.

The step is the same Program as in a run, timed by the simulator. The time of a step is the simulated makespan, the part of
the gradients' reduction that is exposed, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.base.counts import plural, require_count
from penstock.base.errors import ConfigError
from penstock.plan.assumptions import assumptions, interval, sharded_text, stored_text
from penstock.plan.cluster import Cluster, GroupedCluster, groups_of, sized_name
from penstock.plan.device_groups import (
    cluster_ranks,
    device_names,
    mean_peak,
    on_groups,
    require_supported,
    usable_bytes,
)
from penstock.plan.op_costs import (
    competing_shares,
    op_costs,
    simulate_beside,
    stage_groups,
    with_split,
)
from penstock.plan.rank_memory import (
    BUCKET_BYTES,
    RankMemory,
    StoreRoom,
    fitting_costs,
    moving_weights,
    rank_memory,
    ranks_of_host,
    residency_of,
    store_room,
    updated_parameters,
)
from penstock.plan.run_layout import Layout, layout_of
from penstock.plan.stage_costs import (
    StageCosts,
    Table,
    collective_seconds,
    dtype_of,
    even_counts,
    layer_times,
    rank_parameters,
    require_inputs,
)
from penstock.profile.closed_form import MAIN_BYTES, PARAMETER_BYTES
from penstock.profile.model_profile import Profile, default_sequence
from penstock.schedule.check import check
from penstock.schedule.families import require_family
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.residency import Residency
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import is_csv, read_csv
from penstock.simulate.reduction import reduce_gradients
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import bubbles, makespan
from penstock.trace.events import Trace

MAX_BUCKETS = 16
_LARGEST = 10**9
_UPDATE_BYTES = {"fp32": 32, "bf16": 38, "fp16": 38, "fp8": 38}
"""Bytes that norm and update read and write per parameter: gradient, moments, main weight, weight."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted step of a layout.

    Attributes:
        layout: the layout, with the number of stages per rank filled in.
        step_seconds: seconds of a step.
        low, high: interval in which the measured step is expected: seconds divided by a factor, and times this factor;
            None if the cluster claims none.
        tokens_per_second: tokens of a batch over the seconds of a step, over all devices.
        tflops_per_device: TFLOP/s of a device, of the model's FLOPs: forward and twice as many in the backward, less those
            that gradients of frozen weights would take.
        hardware_tflops_per_device: the same with what is recomputed.
        mfu, hfu: these two over the device's rated FLOP/s.
        memory: peak bytes of a device of every pipeline rank.
        capacity: bytes of a device's memory that a layout may use; of unlike devices, of the fullest one.
        reserved: bytes of its memory besides, which are left free.
        devices: name of the device of every pipeline rank, and capacities: bytes of it that a layout may use, if devices are
            unlike; empty otherwise.
        store_room: bytes that a store takes of the fullest host's memory and disks.
        bubble: idle share of ranks × makespan.
        causes: that share by cause, as in `penstock.trace.bubbles`.
        parts: seconds of a step by part: "pipeline", "reduction" (exposed), "sharding" (what gathers of weights, and
            reductions before a stage's last, add), "optimizer", "overhead".
        dtype: dtype of the matrix products.
        unit: "tokens", or "samples" if a sample of the model has no tokens; `tokens_per_second` counts these.
        assumptions: sentences about what the layout leaves open.
        cluster: cluster that it is a prediction for; a search may leave groups out, or place them in another order.
        costs, program, trace: costs of the stages, and the simulated step.
    """

    layout: Layout
    step_seconds: float
    low: float | None
    high: float | None
    tokens_per_second: float
    tflops_per_device: float
    hardware_tflops_per_device: float
    mfu: float
    hfu: float
    memory: tuple[RankMemory, ...]
    capacity: float
    bubble: float
    causes: Mapping[str, float]
    parts: Mapping[str, float]
    dtype: str = "bf16"
    unit: str = "tokens"
    reserved: float = 0.0
    store_room: StoreRoom = field(default_factory=StoreRoom)
    assumptions: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    capacities: tuple[float, ...] = ()
    cluster: Cluster | None = field(default=None, repr=False, compare=False)
    costs: StageCosts | None = field(default=None, repr=False, compare=False)
    program: Program | None = field(default=None, repr=False, compare=False)
    trace: Trace | None = field(default=None, repr=False, compare=False)

    @property
    def fullest(self) -> int:
        """Pipeline rank whose device is the fullest, by its share of what a layout may use."""
        return _fullest(self.memory, self.capacities or (self.capacity,) * len(self.memory))

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest device."""
        return self.memory[self.fullest].total

    @property
    def fits(self) -> bool:
        """True if every device has the memory it needs."""
        return self.peak_bytes <= self.capacity

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction as values that JSON can represent."""
        return {
            "layout": self.layout.as_dict(),
            "cluster": None if self.cluster is None else sized_name(self.cluster),
            "step_seconds": self.step_seconds,
            "low": self.low,
            "high": self.high,
            "tokens_per_second": self.tokens_per_second,
            "unit": self.unit,
            "tflops_per_device": self.tflops_per_device,
            "hardware_tflops_per_device": self.hardware_tflops_per_device,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "memory": [rank.as_dict() for rank in self.memory],
            "devices": list(self.devices),
            "capacities": [round(capacity) for capacity in self.capacities],
            "capacity": round(self.capacity),
            "reserved": round(self.reserved),
            "store_room": {name: round(size) for name, size in self.store_room._asdict().items()},
            "fits": self.fits,
            "bubble": self.bubble,
            "bubble_causes": dict(self.causes),
            "parts": dict(self.parts),
            "split": list(self.costs.counts) if self.costs is not None else None,
            "assumptions": list(self.assumptions),
        }


def predict(
    profile: Profile,
    cluster: Cluster,
    layout: Layout | Mapping[str, Any] | str,
    *,
    sequence: int | None = None,
    batch: int | None = None,
    order: Schedule | None = None,
    order_name: str = "",
) -> Prediction:
    """Predict a step.

    Args:
        profile: costs of the model's layers.
        cluster: devices and links.
        layout: the layout, as `Layout.parse` reads it if it is text.
        sequence: tokens of a sample (default: as `default_sequence`).
        batch: samples of a step, over all replicas (default: 4 microbatches for each pipeline rank of each replica).
        order: schedule to run instead of the layout's (default none).
        order_name: path of the file that `order` will have, which becomes the layout's schedule.

    Raises:
        ConfigError: if the layout contradicts itself, needs more devices than there are, or does not divide the batch.
        ScheduleError: if the schedule's family does not allow the counts.
    """
    require_inputs(profile, cluster)
    layout = layout_of(layout)
    sequence = default_sequence(profile) if sequence is None else sequence
    batch = 4 * layout.pp * layout.dp * layout.microbatch if batch is None else batch
    for name, count in (("sequence", sequence), ("batch", batch)):
        require_count(name, count, most=_LARGEST)
    require_storable(profile, layout.store)
    require_supported(profile, cluster, layout.store)
    microbatches = count_microbatches(layout, cluster, batch)
    if order is None:
        program = step_program(layout.schedule, layout.pp, microbatches, layout.v)
    else:
        program = check(order).program
        layout = layout.with_values(schedule=order_name)
    schedule = program.schedule
    layout = layout.with_values(v=schedule.stages // layout.pp)
    times = layer_times(profile, cluster, layout, sequence)
    dtype = dtype_of(profile, cluster, layout)
    limits = usable_bytes(cluster, layout)
    costs = fitting_costs(times, layout, schedule, dtype, limits)
    if layout.split == "cost" and costs.counts == even_counts(profile.blocks, schedule.stages):
        layout = layout.with_values(split="even")
    trace = _simulated(program, costs, profile, cluster, layout)
    split = bubbles(trace)
    pipeline = float(makespan(trace))

    sharding = _exposed_sharding(program, trace, costs, profile, cluster, layout)
    reduction, trace = _exposed_reduction(program, trace, costs, cluster, layout, dtype)
    optimizer = optimizer_seconds(costs, cluster, layout, dtype, schedule.placement)
    overhead = cluster.step_overhead + profile.step_overhead
    seconds = pipeline + reduction + sharding + optimizer + overhead
    replicas = layout.dp * microbatches
    forward, repeated = float(costs.model_flops.sum()), float(costs.repeated_flops.sum())
    # FLOPs divided by this are TFLOP/s of a device.
    per_device = 1e12 * seconds * layout.devices
    # The backward has twice the FLOPs of the forward: gradients of the inputs, and of the weights, unless they are frozen.
    trained = 3 * forward - float(costs.frozen_flops.sum())
    model = trained * replicas / per_device
    hardware = (trained + repeated) * replicas / per_device
    peak_rate = mean_peak(cluster, layout, dtype) / 1e12
    error, _ = interval(profile, cluster, layout, sequence)
    room = store_room(schedule, costs, layout, dtype, ranks_of_host(cluster, layout))
    unit = "samples" if profile.shape is None and profile.sequence is None and sequence == 1 else "tokens"
    total = float(split.makespan) * schedule.ranks
    causes = {cause: float(np.sum(idle)) / total if total else 0.0 for cause, idle in split.idle.items()}
    memory = rank_memory(schedule, costs, layout, dtype)
    capacities = () if limits is None else tuple(limits.tolist())
    groups = groups_of(cluster)
    fullest = _fullest(memory, capacities or (groups[0].device.usable,) * layout.pp)
    device = groups[cluster_ranks(cluster, layout)[fullest]].device
    return Prediction(
        layout=layout,
        step_seconds=seconds,
        low=None if error is None else seconds / (1 + error),
        high=None if error is None else seconds * (1 + error),
        tokens_per_second=batch * sequence / seconds,
        tflops_per_device=model,
        hardware_tflops_per_device=hardware,
        mfu=model / peak_rate,
        hfu=hardware / peak_rate,
        memory=memory,
        capacity=device.usable,
        reserved=device.reserved,
        store_room=room,
        bubble=sum(causes.values()),
        causes=causes,
        parts={
            "pipeline": pipeline,
            "reduction": reduction,
            "sharding": sharding,
            "optimizer": optimizer,
            "overhead": overhead,
        },
        dtype=dtype,
        unit=unit,
        assumptions=(
            *assumptions(profile, cluster, layout, sequence),
            *sharded_text(schedule, layout),
            *stored_text(schedule, room, cluster, layout),
        ),
        devices=device_names(cluster, layout),
        capacities=capacities,
        cluster=cluster,
        costs=costs,
        program=program,
        trace=trace,
    )


def _fullest(memory: Sequence[RankMemory], limits: Sequence[float]) -> int:
    sizes = [(rank.total / limit, rank.total) for rank, limit in zip(memory, limits, strict=True)]
    return sizes.index(max(sizes))


def _simulated(
    program: Program,
    costs: StageCosts,
    profile: Profile,
    cluster: Cluster,
    layout: Layout,
    moving: tuple[Table, Table] | None = None,
) -> Trace:
    """Return a simulated step.

    Args:
        moving: seconds of the program's gathers and of its reductions, by stage; None (default) for none.
    """
    runtime = profile.runtime
    alone = with_split(
        program, op_costs(costs, cluster, layout, runtime, profile.op_overhead), costs, runtime
    )
    if moving is not None:
        alone = replace(alone, gather=moving[0], reduce=moving[1])
    if runtime is None:
        return simulate(program, alone)
    return simulate_beside(program, alone, competing_shares(costs, runtime), layout.replicas)


def require_storable(profile: Profile, store: str) -> None:
    """Raise `ConfigError` if a store cannot keep the weights of a model."""
    if store != "none" and profile.shape is not None and profile.shape.base_bits < 16:
        raise ConfigError(
            f"store={store} keeps plain tensors, and a base of {profile.shape.base_bits} bits has others; leave out the "
            "store, or take 16 bits"
        )


def count_microbatches(layout: Layout, cluster: Cluster, batch: int) -> int:
    """Return the number of microbatches of a replica."""
    if layout.devices > cluster.devices:
        context = f" x cp={layout.cp}" if layout.cp > 1 else ""
        raise ConfigError(
            f"the layout needs {layout.devices} devices (pp={layout.pp} x dp={layout.dp}{context} x tp={layout.tp}), and "
            f"{cluster.name} has {cluster.devices}; take smaller degrees or a larger cluster"
        )
    cluster_ranks(cluster, layout)
    if (stage := layout.replicas * layout.tp) % layout.ep:
        product = "dp x tp" if layout.cp == 1 else "dp x cp x tp"
        raise ConfigError(
            f"ep={layout.ep} does not divide {product} = {stage}, the devices of a stage, over which experts "
            f"are divided; take a divisor of {stage}"
        )
    if layout.ep > 1 and layout.sharding.comes_and_goes:
        raise ConfigError(
            f"shard={layout.shard} does not divide experts that ep={layout.ep} divides already; use shard=optimizer, or ep=1"
        )
    share = layout.dp * layout.microbatch
    if batch % share:
        below, above = batch // share * share, -(-batch // share) * share
        near = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"a batch of {batch} does not divide over dp={layout.dp} with microbatches of {layout.microbatch}; the nearest "
            f"batch that does is {near}"
        )
    return batch // share


def step_program(schedule: str, ranks: int, microbatches: int, virtual_stages: int | None) -> Program:
    """Return the proven program of a schedule family, of the user's function, or of a CSV file."""
    if is_csv(schedule):
        built = read_csv(schedule)
        if (built.ranks, built.microbatches) != (ranks, microbatches):
            raise ConfigError(
                f"{schedule} is for {plural(built.ranks, 'rank')} and {plural(built.microbatches, 'microbatch')}, "
                f"but the layout has pp={ranks} and {plural(microbatches, 'microbatch')} a replica"
            )
        return check(built).program
    return _family_program(schedule, ranks, microbatches, virtual_stages)


@lru_cache(maxsize=256)
def _family_program(schedule: str, ranks: int, microbatches: int, virtual_stages: int | None) -> Program:
    return check(family_schedule(schedule, ranks, microbatches, virtual_stages)).program


@lru_cache(maxsize=512)
def family_schedule(name: str, ranks: int, microbatches: int, virtual_stages: int | None) -> Schedule:
    """Return a family's schedule, which is not yet proven."""
    family = require_family(name)
    fixed = not family.chooses_virtual_stages and virtual_stages == 1
    return family.build(ranks, microbatches, None if fixed else virtual_stages)


def _exposed_reduction(
    program: Program, trace: Trace, costs: StageCosts, cluster: Cluster, layout: Layout, dtype: str
) -> tuple[float, Trace]:
    """Return the seconds by which reducing the gradients lengthens the step, and the trace with the reductions."""
    placement = program.schedule.placement
    copies = _copies(placement)
    if layout.replicas * copies == 1:
        return 0.0, trace
    if not overlaps(cluster, layout) or layout.sharding.stored:
        return blocking_reduction(costs, cluster, layout, dtype, placement), trace
    weight, gradient, _ = PARAMETER_BYTES[dtype]
    size = costs.parameters * gradient
    of_experts = costs.expert_parameters * gradient
    groups = stage_groups(costs, cluster, layout)
    seconds = _replica_seconds(
        "all_reduce", size, of_experts, cluster, layout, copies, groups=groups
    ).tolist()
    buckets = {s: int(min(MAX_BUCKETS, max(1, n // BUCKET_BYTES))) for s, n in enumerate(size)}
    reductions = reduce_gradients(program, trace, seconds, buckets)
    ends = float(reductions.trace.end.max())
    exposed = max(0.0, ends - float(makespan(trace)) - float(trace.start.min()))
    return exposed + _exposed_gather(costs, cluster, layout, weight, copies), reductions.trace


def blocking_reduction(
    costs: StageCosts, cluster: Cluster, layout: Layout, dtype: str, placement: Placement
) -> float:
    """Return the seconds to reduce the gradients after the backward, on the rank with most parameters."""
    copies = _copies(placement)
    if layout.replicas * copies == 1:
        return 0.0
    weight, gradient, _ = PARAMETER_BYTES[dtype]
    held = rank_parameters(costs, placement)[:2] * gradient
    if layout.sharding.stored:
        return _sums_at_home(float(held[0].max()), cluster, layout, copies)
    if not isinstance(cluster, GroupedCluster):
        # All links are alike, so the rank with most parameters takes longest.
        held = held[:, [held[0].argmax()]]
    groups = cluster_ranks(cluster, layout)
    seconds = _replica_seconds("all_reduce", held[0], held[1], cluster, layout, copies, groups=groups)
    return float(seconds.max()) + _exposed_gather(costs, cluster, layout, weight, copies)


def _sums_at_home(held: float, cluster: Cluster, layout: Layout, copies: int) -> float:
    """Return the seconds in which holders of the same stages send each other gradients in host memory, and add them up.

    Args:
        held: bytes of the gradients of one rank.
    """
    near = ranks_of_host(cluster, layout)
    # Of each holder's gradients: they are read and written as a message, and read again to be added to a sum.
    at_home = 3 * copies * held / (cluster.host.memory_bandwidth / near)
    return at_home + max(0, copies - near) * held / cluster.network.bandwidth


def _copies(placement: Placement) -> int:
    return max(len(ranks) for ranks in placement.holders)


def overlaps(cluster: Cluster, layout: Layout) -> bool:
    """Return whether a layout's gradients are reduced while the backward runs."""
    return cluster.overlap if layout.overlap is None else layout.overlap


def _exposed_gather(costs: StageCosts, cluster: Cluster, layout: Layout, weight: int, copies: int) -> float:
    """Return the seconds to gather the first layer's weights (ZeRO); the rest is gathered while the next step runs."""
    if layout.sharding.shard == "none":
        return 0.0
    size, of_experts = (
        weight * each / np.maximum(1, costs.counts) for each in (costs.parameters, costs.expert_parameters)
    )
    groups = stage_groups(costs, cluster, layout)
    return float(
        _replica_seconds("all_gather", size, of_experts, cluster, layout, copies, groups=groups).max()
    )


def _exposed_sharding(
    program: Program, trace: Trace, costs: StageCosts, profile: Profile, cluster: Cluster, layout: Layout
) -> float:
    """Return the seconds by which gathers of weights, and reductions before a stage's last, lengthen the step.

    A stage's last reduction is priced as with shard="optimizer": its all-reduce is a reduce-scatter and the gather of the
    updated weights, which with sharded weights is the stage's first gather. Each further stay of weights on a rank takes an
    all-gather of the stage's weights, and each earlier reduction a reduce-scatter of its gradients.

    With overlapping reductions, they are simulated beside the ops. Otherwise all of it is exposed.
    """
    if layout.sharding.stored:
        return _exposed_copies(program, trace, costs, profile, cluster, layout)
    if not layout.sharding.comes_and_goes:
        return 0.0
    residency = residency_of(program.schedule, layout.sharding)
    weight, gradient, _ = PARAMETER_BYTES[dtype_of(profile, cluster, layout)]
    groups = stage_groups(costs, cluster, layout)
    gathers, sums = (
        _replica_seconds(
            unit,
            size * costs.parameters,
            size * costs.expert_parameters,
            cluster,
            layout,
            1,
            groups=groups,
        )
        for unit, size in (("all_gather", weight), ("reduce_scatter", gradient))
    )
    earlier = _earlier_reductions(residency)
    if overlaps(cluster, layout):
        moving = replace(program, residency=replace(residency, reductions=earlier))
        beside = _simulated(moving, costs, profile, cluster, layout, (gathers, sums))
        # The gather before the first op is counted by `_exposed_gather`, too.
        twice = _exposed_gather(costs, cluster, layout, weight, 1)
        return max(0.0, float(makespan(beside) - makespan(trace)) - twice)
    delays = []
    for runs, reductions in zip(residency.runs, earlier, strict=True):
        stays = [run.stage for run in runs]
        again = float(gathers[stays].sum() - gathers[list(set(stays))].sum()) if stays else 0.0
        delays.append(again + float(sum(sums[stage] for _, stage in reductions)))
    return max(delays)


def _exposed_copies(
    program: Program, trace: Trace, costs: StageCosts, profile: Profile, cluster: Cluster, layout: Layout
) -> float:
    """Return the seconds by which copies from and to a store lengthen the step, beside whose ops they are simulated.

    Each stay of weights on a rank takes a copy, and each reduction. Before a stage's later backwards the sums that have left
    come back, which these wait for.
    """
    schedule, sharding = program.schedule, layout.sharding
    residency = residency_of(schedule, sharding)
    gradient = PARAMETER_BYTES[dtype := dtype_of(profile, cluster, layout)][1]
    rate = cluster.host.fetch_rate(layout.store, ranks_of_host(cluster, layout))
    fetch, send = moving_weights(costs, layout, dtype) / rate, gradient * costs.parameters / rate
    beside, waits = [], []
    for all_, earlier in zip(residency.reductions, _earlier_reductions(residency), strict=True):
        # The next op adds to the sums that are still on their way.
        at_once = {row for row, stage in earlier if schedule.stage[row + 1] == stage}
        beside.append(tuple(each for each in all_ if each[0] not in at_once))
        waits.append(float(sum(send[stage] * (1 + (row in at_once)) for row, stage in earlier)))
    moving = replace(program, residency=replace(residency, reductions=tuple(beside)))
    copied = _simulated(moving, costs, profile, cluster, layout, (fetch, send))
    return float(makespan(copied) - makespan(trace)) + max(waits)


def _earlier_reductions(residency: Residency) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the (row, stage) pairs, by rank, of reductions before the last one of their stage."""
    last = [{stage: row for row, stage in of_rank} for of_rank in residency.reductions]
    return tuple(
        tuple((row, stage) for row, stage in of_rank if row != rows[stage])
        for of_rank, rows in zip(residency.reductions, last, strict=True)
    )


def _replica_seconds(
    unit: str,
    size: Table,
    of_experts: Table,
    cluster: Cluster,
    layout: Layout,
    copies: int,
    *,
    groups: Sequence[int],
) -> Table:
    """Return the seconds of collectives among replicas; `of_experts` of the bytes are for those with the same experts.

    The bytes are of stages or ranks, of those `groups` of devices if they are unlike.
    """

    def seconds(group: Cluster) -> Table:
        rest = _group_seconds(unit, size - of_experts, group, layout, copies)
        if not np.any(of_experts):
            return rest
        experts = _group_seconds(unit, of_experts, group, layout, copies, experts=True)
        return rest + np.where(of_experts > 0, experts, 0.0)

    return np.asarray(on_groups(cluster, groups, seconds))


def _group_seconds(
    unit: str, size: Table, cluster: Cluster, layout: Layout, copies: int, *, experts: bool = False
) -> Table:
    # Replicas are so many ranks apart.
    replicas, apart = (layout.expert_replicas, layout.ep) if experts else (layout.replicas, layout.tp)
    group = replicas * copies
    span = layout.devices if copies > 1 else layout.replicas * layout.tp
    link = cluster.ring(replicas, apart, within=span <= cluster.ranks_per_node, reduces=True)
    return np.asarray(collective_seconds(unit, size, group, link))


def optimizer_seconds(
    costs: StageCosts, cluster: Cluster, layout: Layout, dtype: str, placement: Placement
) -> float:
    """Return the seconds of gradient norm and update on the rank that they take longest."""
    host = cluster.host
    bandwidth = on_groups(
        cluster,
        cluster_ranks(cluster, layout),
        lambda group: group.device.optimizer_bandwidth or group.device.memory_bandwidth,
    )
    if layout.sharding.stored:
        # The ranks of a node share its memory.
        shared = host.disk_bandwidth if layout.store == "disk" else host.memory_bandwidth
        bandwidth = shared / ranks_of_host(cluster, layout)
    parameters, experts, _ = rank_parameters(costs, placement)
    updated = updated_parameters(parameters, experts, layout)
    moved = _UPDATE_BYTES[dtype]
    if layout.store == "disk":
        moved -= 2 * MAIN_BYTES[dtype]  # they are read and written in memory
    return float((updated * moved / bandwidth).max())
