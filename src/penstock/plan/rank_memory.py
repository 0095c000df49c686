"""Bytes that each pipeline rank of a layout needs at its peak, by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.plan.op_costs import merged_backwards
from penstock.plan.rank_devices import RankDevices
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import LayerTimes, StageCosts, rank_parameters, stage_costs
from penstock.plan.states import states_of
from penstock.plan.states.on_devices import BUCKET_BYTES
from penstock.plan.states.states import States, residency_of
from penstock.schedule.index import rank_column
from penstock.schedule.memory import held
from penstock.schedule.ops import Kind
from penstock.schedule.schedule import Schedule

MARGIN = 0.02
"""Share of the rest that the allocator needs besides, for what it rounds and cannot reuse."""

Rows = npt.NDArray[np.int64]


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


def held_activations(schedule: Schedule, costs: StageCosts) -> Rows:
    """Return the bytes of activations that the rank of every row holds right after that row, shape (ops,)."""
    saved, waiting = (column.round().astype(np.int64) for column in (costs.saved, costs.waiting))
    column = held(schedule, saved, waiting, freed_at="B")
    return column - np.where(merged_backwards(schedule), waiting[0], 0)


def rank_memory(schedule: Schedule, costs: StageCosts, layout: Layout, dtype: str) -> tuple[RankMemory, ...]:
    """Return the peak memory of every pipeline rank."""
    states = states_of(layout, dtype)
    column, freed, during = _activations(schedule, costs)
    sharded = _sharded_states(schedule, costs, states) if layout.sharding.comes_and_goes else None
    inside = during if sharded is None else during + sharded.sum(axis=0)
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
            peak = float(column[row] + freed[row])
            logits = min(float(costs.logits[stage]), float(during[row]) - peak)
            back = float(during[row]) - peak - logits
        sends = max((float(costs.messages[s]) for s in mine), default=0.0)
        takes = max((float(costs.messages[s - 1]) for s in mine if s > 0), default=0.0)
        # Two of each kind: one is in use while the next travels.
        messages = 2 * (sends + takes) if layout.pp > 1 else 0.0
        buckets = min(2 * BUCKET_BYTES, parameters * states.gradient) if layout.replicas > 1 else 0.0
        weights, gradients, moving = states.weight * parameters, states.gradient * parameters, 0.0
        if sharded is not None and row is not None:
            weights, gradients = (float(each[row]) for each in sharded)
            moving = gradients + (weights if layout.sharding.weights_come_and_go else 0.0)
        ranks.append(
            RankMemory(
                weights=weights + states.on_device(float(costs.frozen_bytes[mine].sum())),
                gradients=gradients,
                optimizer=float(states.on_device(states.optimizer_bytes(counts))),
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
    devices: RankDevices,
    quickest: StageCosts | None = None,
) -> StageCosts:
    """Return the stages' costs, with ``split="cost"`` of the quickest split whose ranks all fit on their devices.

    A rank that does not fit gets fewer blocks, and the split is found again: with as many blocks it would not fit in any
    other. If no split fits, it is the quickest one. Alike devices have a split by time alone.

    Args:
        quickest: costs with the quickest split, if they are known.
    """
    costs = quickest = quickest or stage_costs(times, layout, schedule.placement)
    if devices.alike or layout.split != "cost":
        return costs
    blocks, stages_of = sum(costs.counts), schedule.placement.stages_of
    most = np.full(layout.pp, blocks)
    while True:
        sizes = np.array([rank.total for rank in rank_memory(schedule, costs, layout, dtype)])
        counts = np.array([sum(costs.counts[stage] for stage in mine) for mine in stages_of])
        if (counts > most).any():
            return quickest
        if (sizes <= devices.usable).all():
            return costs
        most = np.where(sizes > devices.usable, counts - 1, most)
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

    Each rank's bytes are divided by `limits`, one number or of shape (ranks,).

    Of these it has its share, and in full what the op itself reads or adds to: a bound that is sooner found than the peak.
    """
    states = states_of(layout, dtype)
    weight, gradient = states.weight, states.gradient
    kind, size = schedule.kind, costs.parameters[schedule.stage]
    inside = _activations(schedule, costs)[-1]
    counts = rank_parameters(costs, schedule.placement)
    total = counts[0]
    read = weight * size * (kind != Kind.W)
    weights = (weight * total)[rank_column(schedule)]
    full = np.minimum(weights, weights / layout.replicas + read)
    full += gradient * size * ((kind != Kind.F) & (kind != Kind.R))
    state = states.device_bytes(counts) - weight * total / layout.replicas
    state, limits = state[rank_column(schedule)], np.broadcast_to(limits, counts.shape[1:])
    return float(((inside + full + state) / limits[rank_column(schedule)]).max())


def _activations(schedule: Schedule, costs: StageCosts) -> tuple[Rows, Rows, Rows]:
    """Return columns by row: bytes held after it, bytes freed by it, bytes during it."""
    saved, waiting = (column.round().astype(np.int64) for column in (costs.saved, costs.waiting))
    column = held_activations(schedule, costs)
    # A recomputed layer, and the gradient of the logits, are in memory during their stage's backward alone.
    backward = (schedule.kind == Kind.B) | (schedule.kind == Kind.I)
    # The row holds what is left when the op ends; until then, a backward holds what its forward saved.
    halved = (schedule.kind == Kind.I) & ~merged_backwards(schedule)
    left = np.where(halved, waiting[schedule.stage], 0)
    freed = np.where(backward, np.maximum(saved[schedule.stage] - left, 0), 0)
    # A backward has most in its first layer, while all others hold what they saved; but where a first half leaves more than
    # was saved, in its last layer, when the others hold what they leave.
    transient, last = (each.astype(np.int64)[schedule.stage] for each in (costs.transient, costs.halved))
    most = saved[schedule.stage] + transient
    most = np.where(halved, np.maximum(most, left + last), most)
    return column, freed, np.where(backward, column - left + most, column)


def _sharded_states(schedule: Schedule, costs: StageCosts, states: States) -> Rows:
    """Return the bytes of weights and of gradients that the rank of every row holds, shape (2, ops)."""
    parameters = costs.parameters.round().astype(np.int64)
    residency, replicas = residency_of(schedule, states.layout.sharding), states.layout.replicas
    moving = states.moving_weights(costs).round().astype(np.int64)
    weights = residency.held(schedule, moving, 0, replicas)
    gradients = residency.held(schedule, 0, states.gradient * parameters, replicas)
    return np.stack((weights, gradients))
