"""Questions of a plan to the place where a layout keeps weights, gradients and the optimizer's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.plan.cluster import Cluster
from penstock.plan.op_costs import simulate_layout
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import StageCosts, Table, rank_parameters
from penstock.profile.closed_form import MOMENT_BYTES, PARAMETER_BYTES
from penstock.profile.model_profile import Profile
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.residency import Residency, make_residency
from penstock.schedule.schedule import Schedule
from penstock.trace.bubbles import makespan
from penstock.trace.events import Trace

Parameters = TypeVar("Parameters", float, npt.NDArray[np.float64])
# Parameters, those of them that are experts', and those that Muon may update: numbers, or arrays of them.
Counts = Sequence[Any] | npt.NDArray[np.float64]

_UPDATE_BYTES = {"fp32": 32, "bf16": 38, "fp16": 38, "fp8": 38}
"""Bytes that norm and update read and write per parameter: gradient, moments, main weight, weight."""

residency_of = lru_cache(maxsize=64)(make_residency)
"""`make_residency`, which a search asks for the same schedule with several sizes of its stages."""


class StoreRoom(NamedTuple):
    """Bytes that a store takes on the fullest host."""

    memory: float = 0.0
    disk: float = 0.0


class SimulatedStep(NamedTuple):
    """A step that was simulated without gathers and reductions."""

    program: Program
    trace: Trace
    costs: StageCosts
    profile: Profile
    cluster: Cluster

    def lengthened(self, layout: Layout, residency: Residency, gather: Table, reduce: Table) -> float:
        """Return the seconds by which gathers and reductions beside the ops lengthen the step; they may be by stage."""
        moving = replace(self.program, residency=residency)
        beside = simulate_layout(moving, self.costs, self.profile, self.cluster, layout, (gather, reduce))
        return float(makespan(beside) - makespan(self.trace))


class States(ABC):
    """Weights, gradients and the optimizer's state of a layout.

    Args:
        dtype: dtype of the matrix products.

    Attributes:
        weight, gradient: bytes of a parameter's weight and gradient.
        no_interval: reason why a step has no interval; empty if it may have one.
    """

    no_interval = ""

    def __init__(self, layout: Layout, dtype: str) -> None:
        self.layout, self.dtype = layout, dtype
        self.weight, self.gradient, self._optimizer = PARAMETER_BYTES[dtype]

    @abstractmethod
    def device_bytes(self, counts: Counts) -> Any:
        """Return the bytes on one device of so many parameters, before the first backward."""

    @abstractmethod
    def on_device(self, size: Any) -> Any:
        """Return how many of the bytes of frozen weights, or of the optimizer's state, are on their device all the time."""

    @abstractmethod
    def moving_weights(self, costs: StageCosts) -> Table:
        """Return the bytes of each stage's weights that come and go, if weights do."""

    @abstractmethod
    def moves(self, step: SimulatedStep) -> float:
        """Return the seconds by which weights and gradients that come and go lengthen a step, but for last reductions."""

    def reduction(self, step: SimulatedStep) -> tuple[float, Trace]:
        """Return the seconds by which sums of gradients lengthen a step, and the step with those that are beside its ops."""
        return self.reduction_after(step.costs, step.cluster, step.program.schedule.placement), step.trace

    @abstractmethod
    def reduction_after(self, costs: StageCosts, cluster: Cluster, placement: Placement) -> float:
        """Return the seconds of sums of gradients after the last backward, on the rank that they take longest."""

    @abstractmethod
    def update_rate(self, cluster: Cluster) -> Any:
        """Return the bytes per second of an update, one number or one by rank."""

    @abstractmethod
    def sentences(self, schedule: Schedule, cluster: Cluster, room: StoreRoom) -> tuple[str, ...]:
        """Return what a plan says of them."""

    def store_room(self, schedule: Schedule, costs: StageCosts, cluster: Cluster) -> StoreRoom:
        """Return the bytes of them in a store."""
        return StoreRoom()

    @property
    def update_bytes(self) -> int:
        """Bytes that norm and update read and write for each parameter."""
        return _UPDATE_BYTES[self.dtype]

    def update_seconds(self, costs: StageCosts, cluster: Cluster, placement: Placement) -> float:
        """Return the seconds of gradient norm and update on the rank that they take longest."""
        parameters, experts, _ = rank_parameters(costs, placement)
        moved = self.updated(parameters, experts) * self.update_bytes
        return float((moved / self.update_rate(cluster)).max())

    def optimizer_bytes(self, counts: Counts) -> Any:
        """Return the bytes of one rank's optimizer state, with a mean share of the matrices that Muon updates."""
        parameters, experts, matrices = counts
        size = self._optimizer * self.updated(parameters, experts)
        if self.layout.optimizer == "muon":
            size = size - MOMENT_BYTES * self.updated(matrices, 0 * experts)
        return size

    def updated(self, parameters: Parameters, experts: Parameters) -> Parameters:
        """Return the number of parameters that one device updates: its share of them if they are sharded, or all."""
        if self.layout.shard == "none":
            return parameters
        return (parameters - experts) / self.layout.replicas + experts / self.layout.expert_replicas


def overlaps(cluster: Cluster, layout: Layout) -> bool:
    """Return whether a layout's gradients are reduced while the backward runs."""
    return cluster.overlap if layout.overlap is None else layout.overlap


def most_holders(placement: Placement) -> int:
    """Return the largest number of ranks that hold one stage."""
    return max(len(ranks) for ranks in placement.holders)


def earlier_reductions(residency: Residency) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the (row, stage) pairs, by rank, of reductions before the last one of their stage."""
    last = [{stage: row for row, stage in of_rank} for of_rank in residency.reductions]
    return tuple(
        tuple((row, stage) for row, stage in of_rank if row != rows[stage])
        for of_rank, rows in zip(residency.reductions, last, strict=True)
    )
