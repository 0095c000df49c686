"""Costs of the ops of a layout: its stages' costs, what the runtime adds, and the slowdown by other ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.plan.cluster import Cluster
from penstock.plan.rank_devices import RankDevices
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import StageCosts
from penstock.profile.model_profile import Profile, RuntimeCosts
from penstock.schedule.ops import Kind
from penstock.schedule.program import Program
from penstock.schedule.schedule import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.beside import time_beside
from penstock.trace.events import Trace

Table = npt.NDArray[np.float64]

_ROUNDS = 6
"""Simulations until the slowdown of ops and their overlap agree."""
_KINDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input_grad",
    Kind.W: "weight_grad",
    Kind.R: "forward",
}


def op_costs(
    costs: StageCosts,
    cluster: Cluster,
    layout: Layout,
    runtime: RuntimeCosts | None = None,
    overhead: float = 0.0,
) -> Costs:
    """Return the simulator's costs of a layout's stages, as long as each rank runs alone and no backward is split.

    `overhead` is seconds of each op, in addition to `runtime` and the cluster's overhead.
    """
    seconds = np.zeros((len(costs.forward), len(Kind)))
    devices = RankDevices(cluster, layout)
    of_cluster = devices.each(lambda group: group.op_overhead, costs.ranks)
    for kind, name in _KINDS.items():
        added = 0.0 if runtime is None else getattr(runtime, name)
        seconds[:, kind] = getattr(costs, name) + of_cluster + overhead + added
    # What is recomputed runs before the first half of the backward.
    seconds[:, Kind.B] += costs.again
    seconds[:, Kind.I] += costs.again
    if runtime is not None:
        seconds[:, Kind.F] += runtime.segment * (costs.segments - 1)
    messages = [round(size) for size in costs.messages[:-1]]
    return Costs(seconds, communication=devices.communication(messages, costs.ranks))


def merged_backwards(schedule: Schedule) -> npt.NDArray[np.bool_]:
    """Return which rows are an I that runs as a whole backward, shape (ops,).

    No op needs the gradient of the model's input. So an I of the first stage whose W follows at once is a whole backward.
    """
    merged = np.zeros(len(schedule.kind), np.bool_)
    first = np.flatnonzero((schedule.kind[:-1] == Kind.I) & (schedule.stage[:-1] == 0))
    follows = (schedule.kind[first + 1] == Kind.W) & (schedule.stage[first + 1] == 0)
    merged[first] = follows & (schedule.microbatch[first + 1] == schedule.microbatch[first])
    return merged


def split_shares(program: Program) -> Table:
    """Return the share of every stage's backwards that run as two halves, shape (stages,)."""
    schedule = program.schedule
    halves = schedule.kind == Kind.I
    shares = np.zeros(schedule.stages)
    shares[schedule.stage[halves]] = 1.0
    if first := np.count_nonzero(halves & (schedule.stage == 0)):
        shares[0] = 1.0 - np.count_nonzero(merged_backwards(schedule)) / first
    return shares


def with_split(program: Program, costs: Costs, stages: StageCosts, runtime: RuntimeCosts | None) -> Costs:
    """Return the costs of a program in which backwards are split.

    The forward prepares for it. A merged pair of I and W takes a whole backward, and its W nothing.
    """
    shares = split_shares(program)
    if not shares.any():
        return costs
    seconds = costs.seconds.copy()
    if runtime is not None:
        seconds[:, Kind.F] += runtime.prepare * np.diff(stages.starts) * shares
    if (program.schedule.kind[program.schedule.stage == 0] == Kind.I).any():
        merged, whole = 1.0 - shares[0], seconds[0, Kind.B]
        seconds[0, Kind.I] += merged * (whole - seconds[0, Kind.I])
        seconds[0, Kind.W] *= shares[0]
    return replace(costs, seconds=seconds)


def competing_shares(costs: StageCosts, runtime: RuntimeCosts) -> Table:
    """Return the share of each op in which it competes with other ranks, shape (stages, kinds).

    Backwards that recompute have the forward's share for that part.
    """
    shares = np.zeros((len(costs.forward), len(Kind)))
    for kind, name in _KINDS.items():
        shares[:, kind] = getattr(runtime, f"beside_{name}")
    for kind, part in ((Kind.B, costs.backward), (Kind.I, costs.input_grad)):
        again = costs.again / np.maximum(costs.again + part, 1e-12)
        shares[:, kind] += again * (runtime.beside_forward - shares[:, kind])
    return shares


def simulate_beside(program: Program, costs: Costs, shares: Table, replicas: int = 1) -> Trace:
    """Simulate a program whose ops slow each other down.

    Replicas run the same op at the same time.

    The slowdown depends on which ops overlap, and that on the slowdown. So the simulation is repeated until both
    agree, with one slowdown for all ops of a stage and kind. `shares`, of shape (stages, kinds), are the parts of
    each op in which it competes with other ranks.
    """
    # The product of two shares (see `RuntimeCosts`) is a square where both ops are the same.
    costs = replace(costs, seconds=costs.seconds * (1.0 + (replicas - 1) * shares**2))
    trace = simulate(program, costs)
    if program.schedule.ranks < 2 or not shares.any():
        return trace
    slowdown = np.ones_like(costs.seconds)
    for n in range(_ROUNDS):
        rows = np.flatnonzero(trace.kind < len(Kind))
        cells = trace.stage[rows] * len(Kind) + trace.kind[rows]
        own = shares.ravel()[cells]
        length = (trace.end[rows] - trace.start[rows]).astype(np.float64)
        beside = time_beside(trace, rows, own)
        total, spent = (
            np.bincount(cells, weights, slowdown.size).reshape(slowdown.shape)
            for weights in (own * beside, length)
        )
        found = 1.0 + total / np.maximum(spent, 1e-12)
        # Half of the change, because full changes may swing between two answers.
        slowdown = found if n == 0 else (slowdown + found) / 2
        trace = simulate(program, replace(costs, seconds=costs.seconds * slowdown))
    return trace


def simulate_layout(
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
