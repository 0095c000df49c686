"""Prediction of a step: its time, memory and idle time, from a profile, a cluster and a layout.

The step is the same Program as in a run, timed by the simulator. The time of a step is the simulated makespan, the part of
the gradients' reduction that is exposed, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.base.counts import plural, require_count
from penstock.base.errors import ConfigError
from penstock.plan.assumptions import assumptions, interval
from penstock.plan.cluster import Cluster, sized_name
from penstock.plan.op_costs import simulate_layout
from penstock.plan.rank_devices import RankDevices, why_not_planned
from penstock.plan.rank_memory import RankMemory, fitting_costs, rank_memory
from penstock.plan.run_layout import Layout, layout_of
from penstock.plan.stage_costs import (
    StageCosts,
    dtype_of,
    even_counts,
    layer_times,
    require_inputs,
)
from penstock.plan.states import states_of
from penstock.plan.states.states import SimulatedStep, StoreRoom
from penstock.profile.model_profile import Profile, default_sequence
from penstock.schedule.check import check
from penstock.schedule.families import require_family
from penstock.schedule.program import Program
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import is_csv, read_csv
from penstock.trace.bubbles import bubbles, makespan
from penstock.trace.events import Trace

_LARGEST = 10**9


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
        capacities, reserves: bytes of every pipeline rank's device that a layout may use, and that are left free.
        devices: name of the device of every pipeline rank, if devices are unlike; empty otherwise.
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
    capacities: tuple[float, ...]
    reserves: tuple[float, ...]
    bubble: float
    causes: Mapping[str, float]
    parts: Mapping[str, float]
    dtype: str = "bf16"
    unit: str = "tokens"
    store_room: StoreRoom = field(default_factory=StoreRoom)
    assumptions: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    cluster: Cluster = field(repr=False, compare=False)
    costs: StageCosts | None = field(default=None, repr=False, compare=False)
    program: Program | None = field(default=None, repr=False, compare=False)
    trace: Trace | None = field(default=None, repr=False, compare=False)

    @property
    def fullest(self) -> int:
        """Pipeline rank whose device is the fullest, by its share of what a layout may use, and then by its bytes."""
        sizes = [rank.total for rank in self.memory]
        shares = [(size / limit, size) for size, limit in zip(sizes, self.capacities, strict=True)]
        return shares.index(max(shares))

    @property
    def capacity(self) -> float:
        """Bytes of the fullest device that a layout may use."""
        return self.capacities[self.fullest]

    @property
    def reserved(self) -> float:
        """Bytes of the fullest device that a layout leaves free."""
        return self.reserves[self.fullest]

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
            "cluster": sized_name(self.cluster),
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
            "capacities": [round(capacity) for capacity in self.capacities if self.devices],
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
    if why := why_not_planned(profile, cluster, layout.store):
        raise ConfigError(why)
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
    devices = RankDevices(cluster, layout)
    costs = fitting_costs(times, layout, schedule, dtype, devices)
    if layout.split == "cost" and costs.counts == even_counts(profile.blocks, schedule.stages):
        layout = layout.with_values(split="even")
    trace = simulate_layout(program, costs, profile, cluster, layout)
    split = bubbles(trace)
    pipeline = float(makespan(trace))

    states, step = states_of(layout, dtype), SimulatedStep(program, trace, costs, profile, cluster)
    sharding = states.moves(step)
    reduction, trace = states.reduction(step)
    optimizer = states.update_seconds(costs, cluster, schedule.placement)
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
    peak_rate = devices.mean_peak(dtype) / 1e12
    error, _ = interval(profile, cluster, layout, sequence)
    room = states.store_room(schedule, costs, cluster)
    unit = "samples" if profile.shape is None and profile.sequence is None and sequence == 1 else "tokens"
    total = float(split.makespan) * schedule.ranks
    causes = {cause: float(np.sum(idle)) / total if total else 0.0 for cause, idle in split.idle.items()}
    memory = rank_memory(schedule, costs, layout, dtype)
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
        capacities=tuple(devices.usable.tolist()),
        reserves=tuple(devices.each(lambda group: group.device.reserved).tolist()),
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
            *states.sentences(schedule, cluster, room),
        ),
        devices=devices.names,
        cluster=cluster,
        costs=costs,
        program=program,
        trace=trace,
    )


def count_microbatches(layout: Layout, cluster: Cluster, batch: int) -> int:
    """Return the number of microbatches of a replica."""
    if layout.devices > cluster.devices:
        context = f" x cp={layout.cp}" if layout.cp > 1 else ""
        raise ConfigError(
            f"the layout needs {layout.devices} devices (pp={layout.pp} x dp={layout.dp}{context} x tp={layout.tp}), and "
            f"{cluster.name} has {cluster.devices}; take smaller degrees or a larger cluster"
        )
    width = layout.replicas * layout.tp
    if (ranks := cluster.ranks(width)) < layout.pp:
        sizes = " + ".join(map(str, cluster.sizes))
        raise ConfigError(
            f"the layout needs pp={layout.pp} ranks of {plural(width, 'device')} (dp x cp x tp) that are of one group, and "
            f"groups of {sizes} devices have {ranks}; take smaller degrees"
        )
    if width % layout.ep:
        product = "dp x tp" if layout.cp == 1 else "dp x cp x tp"
        raise ConfigError(
            f"ep={layout.ep} does not divide {product} = {width}, the devices of a stage, over which experts "
            f"are divided; take a divisor of {width}"
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
