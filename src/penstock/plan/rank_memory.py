"""Bytes that each pipeline rank of a layout needs at its peak, by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.plan.profile.closed_form import PARAMETER_BYTES
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import StageCosts
from penstock.schedule.memory import held
from penstock.schedule.ops import Kind
from penstock.schedule.schedule import Schedule

# About the 25 MiB of `penstock.parallel.data.layout`, which imports torch.
BUCKET_BYTES = 25_000_000
"""Bytes of a bucket of gradients in flight."""
MARGIN = 0.02
"""Share of the rest that the allocator needs besides, for what it rounds and cannot reuse."""

Parameters = TypeVar("Parameters", float, npt.NDArray[np.float64])


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Peak bytes of one device of a pipeline rank.

    Attributes:
        weights, gradients, optimizer: bytes of parameters, of their gradients, and of the optimizer's state.
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
        return (
            self.weights + self.gradients + self.optimizer + self.activations + self.recompute
            + self.logits + self.messages + self.buckets + self.margin
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        parts = {
            name: round(getattr(self, name))
            for name in (
                "weights", "gradients", "optimizer", "activations", "recompute", "logits", "messages", "buckets", "margin",
            )
        }  # fmt: skip
        return {"total": sum(parts.values()), **parts, "peak_op": self.peak_op}


def state_bytes(parameters: Parameters, experts: Parameters, layout: Layout, dtype: str) -> Parameters:
    """Return the bytes of weights, gradients and optimizer state of parameters on one device, `experts` of them experts'."""
    weight, gradient, state = PARAMETER_BYTES[dtype]
    return parameters * (weight + gradient) + state * updated_parameters(parameters, experts, layout)


def updated_parameters(parameters: Parameters, experts: Parameters, layout: Layout) -> Parameters:
    """Return the number of parameters that one device updates: its share of them with ZeRO, or all."""
    if not layout.zero:
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


def held_activations(schedule: Schedule, costs: StageCosts) -> npt.NDArray[np.int64]:
    """Return the bytes of activations that the rank of every row holds right after that row, shape (ops,)."""
    saved, waiting = (column.round().astype(np.int64) for column in (costs.saved, costs.waiting))
    column = held(schedule, saved, waiting, freed_at="B")
    return column - np.where(merged_backwards(schedule), waiting[0], 0)


def rank_memory(schedule: Schedule, costs: StageCosts, layout: Layout, dtype: str) -> tuple[RankMemory, ...]:
    """Return the peak memory of every pipeline rank."""
    weight, gradient, state = PARAMETER_BYTES[dtype]
    saved, waiting = (column.round().astype(np.int64) for column in (costs.saved, costs.waiting))
    column = held_activations(schedule, costs)
    # A recomputed layer, and the gradient of the logits, are in memory during their stage's backward alone.
    backward = (schedule.kind == Kind.B) | (schedule.kind == Kind.I)
    # The row holds what is left when the op ends; until then, a backward holds what its forward saved.
    halved = (schedule.kind == Kind.I) & ~merged_backwards(schedule)
    left = np.where(halved, waiting[schedule.stage], 0)
    freed = np.where(backward, np.maximum(saved[schedule.stage] - left, 0), 0)
    inside = column + freed + np.where(backward, costs.transient[schedule.stage], 0).astype(np.int64)
    ranks = []
    for rank, stages in enumerate(schedule.placement.stages_of):
        rows, mine = schedule.rows(rank), list(stages)
        parameters, experts = (
            float(each[mine].sum()) for each in (costs.parameters, costs.expert_parameters)
        )
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
        ranks.append(
            RankMemory(
                weights=weight * parameters,
                gradients=gradient * parameters,
                optimizer=state * updated_parameters(parameters, experts, layout),
                activations=peak,
                recompute=back,
                logits=logits,
                messages=messages,
                buckets=buckets,
                # Weights, gradients and states stay where they are, so the allocator loses nothing with them.
                margin=MARGIN * sum((peak, back, logits, messages, buckets)),
                peak_op=op,
            )
        )
    return tuple(ranks)
