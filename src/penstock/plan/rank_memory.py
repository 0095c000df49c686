"""Bytes that each pipeline rank of a layout needs at its peak, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.plan.cluster import Cluster
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import LayerTimes, StageCosts, rank_parameters, stage_costs
from penstock.profile.closed_form import MAIN_BYTES, MOMENT_BYTES, PARAMETER_BYTES
from penstock.schedule.index import rank_column
from penstock.schedule.memory import held
from penstock.schedule.ops import Kind
from penstock.schedule.residency import make_residency
from penstock.schedule.schedule import Schedule

# About the 25 MiB of `penstock.parallel.replicas.layout`, which imports torch.
BUCKET_BYTES = 25_000_000
"""Bytes of a bucket of gradients in flight."""
MARGIN = 0.02
"""Share of the rest that the allocator needs besides, for what it rounds and cannot reuse."""

Rows = npt.NDArray[np.int64]
Parameters = TypeVar("Parameters", float, npt.NDArray[np.float64])
# Parameters, those of them that are experts', and those that Muon may update: numbers, or arrays of them.
Counts = Sequence[Any] | npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Peak bytes of one device of a pipeline rank.

    Attributes:
        weights, gradients, optimizer: bytes of parameters, of their gradients, and of the optimizer's state; of sharded
            weights and gradients, those that are held at the peak.
        activations: bytes kept for backwards at the peak.
        recompute: bytes of a recomputed layer that is back in memory.
        logits: bytes of the gradient of the logits.
        messages: bytes of values received and sent.
        buckets: bytes of gradients under reduction.
        margin: bytes of the allocator's margin.
        peak_op: op after which the activations are at their peak, such as ``3F7``.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    recompute: float
    logits: float
    messages: float
    buckets: float
    margin: float
    peak_op: str

    @property
    def total(self) -> float:
        held = self.weights + self.gradients + self.optimizer + self.activations + self.recompute
        return held + self.logits + self.messages + self.buckets + self.margin

    def as_dict(self) -> dict[str, Any]:
        parts = {name: round(value) for name, value in vars(self).items() if name != "peak_op"}
        return {"total": sum(parts.values()), **parts, "peak_op": self.peak_op}


def state_bytes(counts: Counts, layout: Layout, dtype: str) -> Any:
    """Return the bytes of weights, gradients and optimizer state on one device of so many parameters, experts' and matrices.

    Of sharded weights they are the device's share, and of sharded gradients nothing: what is held before the first backward.
    With a store, a device has none of them.
    """
    weight, gradient, _ = PARAMETER_BYTES[dtype]
    sharding = layout.sharding
    if sharding.stored:
        return 0 * counts[0]
    always = weight / layout.replicas if sharding.shard == "weights" else weight
    always += 0 if sharding.comes_and_goes else gradient
    return counts[0] * always + optimizer_bytes(counts, layout, dtype)


def optimizer_bytes(counts: Counts, layout: Layout, dtype: str) -> Any:
    """Return the bytes of the optimizer's state on one device, with a mean share of the matrices that Muon updates."""
    parameters, experts, matrices = counts
    size = PARAMETER_BYTES[dtype][2] * updated_parameters(parameters, experts, layout)
    if layout.optimizer == "muon":
        size = size - MOMENT_BYTES * updated_parameters(matrices, 0 * experts, layout)
    return size


residency_of = lru_cache(maxsize=64)(make_residency)
"""`make_residency`, which a search asks for the same schedule with several sizes of its stages."""


def updated_parameters(parameters: Parameters, experts: Parameters, layout: Layout) -> Parameters:
    """Return the number of parameters that one device updates: its share of them if they are sharded, or all."""
    if layout.shard == "none":
        return parameters
    return (parameters - experts) / layout.replicas + experts / layout.expert_replicas


def merged_backwards(schedule: Schedule) -> npt.NDArray[np.bool_]:
    """Return which rows are an I that runs as a whole backward, shape (ops,).

    No op needs the gradient of the model's input. So an I of the first stage whose W follows at once is a whole backward.
    """
    merged = np.zeros(len(schedule.kind), np.bool_)
    first = np.flatnonzero((schedule.kind[:-1] == Kind.I) & (schedule.stage[:-1] == 0))
    follows = (schedule.kind[first + 1] == Kind.W) & (schedule.stage[first + 1] == 0)
    merged[first] = follows & (schedule.microbatch[first + 1] == schedule.microbatch[first])
    return merged


def held_activations(schedule: Schedule, costs: StageCosts) -> Rows:
    """Return the bytes of activations that the rank of every row holds right after that row, shape (ops,)."""
    saved, waiting = (column.round().astype(np.int64) for column in (costs.saved, costs.waiting))
    column = held(schedule, saved, waiting, freed_at="B")
    return column - np.where(merged_backwards(schedule), waiting[0], 0)


def rank_memory(schedule: Schedule, costs: StageCosts, layout: Layout, dtype: str) -> tuple[RankMemory, ...]:
    """Return the peak memory of every pipeline rank."""
    weight, gradient, _ = PARAMETER_BYTES[dtype]
    column, freed, backward, inside = _activations(schedule, costs)
    sharded = _sharded_states(schedule, costs, layout, dtype) if layout.sharding.comes_and_goes else None
    if sharded is not None:
        inside += sharded.sum(axis=0)
    stored = layout.sharding.stored
    ranks, held_by_rank = [], rank_parameters(costs, schedule.placement)
    for rank, stages in enumerate(schedule.placement.stages_of):
        rows, mine = schedule.rows(rank), list(stages)
        counts = held_by_rank[:, rank]
        parameters = float(counts[0])
        row = rows.start + int(inside[rows].argmax()) if len(inside[rows]) else None
        peak, op, back, logits = 0.0, "", 0.0, 0.0
        if row is not None:
            stage = int(schedule.stage[row])
            op = str(schedule.op(row))
            if backward[row]:
                peak = float(column[row] + freed[row])
                logits = float(costs.logits[stage])
                back = float(costs.transient[stage]) - logits if costs.transient[stage] > logits else 0.0
            else:
                peak = float(column[row])
        sends = max((float(costs.messages[s]) for s in mine), default=0.0)
        takes = max((float(costs.messages[s - 1]) for s in mine if s > 0), default=0.0)
        # Two of each kind: one is in use while the next travels.
        messages = 2 * (sends + takes) if layout.pp > 1 else 0.0
        buckets = min(2 * BUCKET_BYTES, parameters * gradient) if layout.replicas > 1 else 0.0
        weights, gradients, moving = weight * parameters, gradient * parameters, 0.0
        if sharded is not None and row is not None:
            weights, gradients = (float(each[row]) for each in sharded)
            moving = gradients + (weights if layout.sharding.weights_come_and_go else 0.0)
        ranks.append(
            RankMemory(
                weights=weights + (0.0 if stored else float(costs.frozen_bytes[mine].sum())),
                gradients=gradients,
                optimizer=0.0 if stored else float(optimizer_bytes(counts, layout, dtype)),
                activations=peak,
                recompute=back,
                logits=logits,
                messages=messages,
                buckets=buckets,
                # What does not come and go stays where it is, so the allocator loses nothing with it.
                margin=MARGIN * sum((peak, back, logits, messages, buckets, moving)),
                peak_op=op,
            )
        )
    return tuple(ranks)


def fitting_costs(
    times: LayerTimes,
    layout: Layout,
    schedule: Schedule,
    dtype: str,
    limits: npt.NDArray[np.float64] | None,
    quickest: StageCosts | None = None,
) -> StageCosts:
    """Return the stages' costs, with ``split="cost"`` of the quickest split whose ranks all fit on their devices.

    A rank that does not fit gets fewer blocks, and the split is found again: with as many blocks it would not fit in any
    other. If no split fits, it is the quickest one.

    Args:
        limits: bytes of each rank's device; None for alike devices, whose split is by time alone.
        quickest: costs with the quickest split, if they are known.
    """
    costs = quickest = quickest or stage_costs(times, layout, schedule.placement)
    if limits is None or layout.split != "cost":
        return costs
    blocks, stages_of = sum(costs.counts), schedule.placement.stages_of
    most = np.full(len(limits), blocks)
    while True:
        sizes = np.array([rank.total for rank in rank_memory(schedule, costs, layout, dtype)])
        counts = np.array([sum(costs.counts[stage] for stage in mine) for mine in stages_of])
        if (counts > most).any():
            return quickest
        if (sizes <= limits).all():
            return costs
        most = np.where(sizes > limits, counts - 1, most)
        if most.min() < 0 or most.sum() < blocks:
            return quickest
        costs = stage_costs(times, layout, schedule.placement, most.tolist())


def bound_sharded(
    schedule: Schedule,
    costs: StageCosts,
    layout: Layout,
    dtype: str,
    limits: npt.NDArray[np.float64] | float = 1.0,
) -> float:
    """Return bytes that the fullest device needs at least, whether weights or gradients alone are sharded.

    Each rank's bytes are divided by `limits`, of shape (ranks,) or one number.

    Of these it has its share, and in full what the op itself reads or adds to: a bound that is sooner found than the peak.
    """
    weight, gradient, _ = PARAMETER_BYTES[dtype]
    kind, size = schedule.kind, costs.parameters[schedule.stage]
    *_, inside = _activations(schedule, costs)
    counts = rank_parameters(costs, schedule.placement)
    total = counts[0]
    read = weight * size * (kind != Kind.W)
    weights = (weight * total)[rank_column(schedule)]
    full = np.minimum(weights, weights / layout.replicas + read)
    full += gradient * size * ((kind != Kind.F) & (kind != Kind.R))
    state = state_bytes(counts, layout, dtype) - weight * total / layout.replicas
    of_rows = limits if isinstance(limits, float) else limits[rank_column(schedule)]
    return float(((inside + full + state[rank_column(schedule)]) / of_rows).max())


def _activations(schedule: Schedule, costs: StageCosts) -> tuple[Rows, Rows, npt.NDArray[np.bool_], Rows]:
    """Return columns by row: bytes held after it, bytes freed by it, whether it is a backward, bytes during it."""
    saved, waiting = (column.round().astype(np.int64) for column in (costs.saved, costs.waiting))
    column = held_activations(schedule, costs)
    # A recomputed layer, and the gradient of the logits, are in memory during their stage's backward alone.
    backward = (schedule.kind == Kind.B) | (schedule.kind == Kind.I)
    # The row holds what is left when the op ends; until then, a backward holds what its forward saved.
    halved = (schedule.kind == Kind.I) & ~merged_backwards(schedule)
    left = np.where(halved, waiting[schedule.stage], 0)
    freed = np.where(backward, np.maximum(saved[schedule.stage] - left, 0), 0)
    inside = column + freed + np.where(backward, costs.transient[schedule.stage], 0).astype(np.int64)
    return column, freed, backward, inside


def _sharded_states(schedule: Schedule, costs: StageCosts, layout: Layout, dtype: str) -> Rows:
    """Return the bytes of weights and of gradients that the rank of every row holds, shape (2, ops)."""
    _, gradient, _ = PARAMETER_BYTES[dtype]
    parameters = costs.parameters.round().astype(np.int64)
    residency = residency_of(schedule, layout.sharding)
    moving = moving_weights(costs, layout, dtype).round().astype(np.int64)
    weights = residency.held(schedule, moving, 0, layout.replicas)
    gradients = residency.held(schedule, 0, gradient * parameters, layout.replicas)
    return np.stack((weights, gradients))


def moving_weights(costs: StageCosts, layout: Layout, dtype: str) -> npt.NDArray[np.float64]:
    """Return the bytes of each stage's weights that come and go; frozen ones do with a store alone."""
    trained = PARAMETER_BYTES[dtype][0] * costs.parameters
    return trained + costs.frozen_bytes if layout.sharding.stored else trained


def ranks_of_host(cluster: Cluster, layout: Layout) -> int:
    """Return the number of a pipeline's ranks that share a host's memory and disks."""
    return min(layout.pp, cluster.ranks_per_node)


class StoreRoom(NamedTuple):
    """Bytes that a store takes on the fullest host."""

    memory: float = 0.0
    disk: float = 0.0


def store_room(schedule: Schedule, costs: StageCosts, layout: Layout, dtype: str, devices: int) -> StoreRoom:
    """Return the bytes of weights, gradients and optimizer state that are in a store; none if the layout has none.

    Args:
        devices: ranks of the pipeline that are on one host.
    """
    if not layout.sharding.stored:
        return StoreRoom()
    counts = rank_parameters(costs, schedule.placement)
    moving = moving_weights(costs, layout, dtype)
    weights = np.array([moving[list(stages)].sum() for stages in schedule.placement.stages_of])
    kept = weights + PARAMETER_BYTES[dtype][1] * counts[0] + optimizer_bytes(counts, layout, dtype)
    # Main weights are kept by `PipelineOptimizer`, in host memory.
    main = MAIN_BYTES[dtype] * counts[0] if layout.store == "disk" else kept
    of_host, in_memory = (
        max(float(each[first : first + devices].sum()) for first in range(0, layout.pp, devices))
        for each in (kept, main)
    )
    return StoreRoom(in_memory, of_host - in_memory)
