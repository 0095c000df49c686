"""Bounds on a layout's seconds and bytes before all of it is chosen: no schedule does with less."""

from __future__ import annotations

import numpy as np

from penstock.plan.explore.search_space import Point, Space
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import LayerTimes, StageCosts, dtype_of, work_shares
from penstock.plan.states import states_of
from penstock.plan.states.states import overlaps
from penstock.schedule.placement import Placement


def least_bytes(space: Space, layout: Layout, times: LayerTimes) -> float:
    """Return the bytes that the fullest device needs at least, whatever the schedule; of unlike ones, its share.

    Before the backward of its first microbatch, the pipeline holds that microbatch on all stages.
    """
    dtype = dtype_of(space.profile, space.cluster, layout)
    kept = np.minimum(times.kept, times.saved) if layout.recompute != "none" else times.saved
    counts = times.counts_of_parameters.sum(axis=1)
    counts[0] -= times.table.tied if layout.pp == 1 else 0
    states = states_of(layout, dtype)
    held = states.on_device(float(times.frozen_bytes.sum())) + float(kept.sum())
    return float((float(states.device_bytes(counts)) + held) / space.limits(layout).sum())


def least_seconds(space: Space, point: Point, times: LayerTimes) -> float:
    """Return the seconds that a step takes at least, whatever the schedule: the ranks' mean work and mean wait."""
    layout = point.layout
    again = times.again[times.recomputes].sum() if layout.recomputes_all else 0.0
    # A measured backward may take less than its two halves.
    backward = np.minimum(times.backward, times.input_grad + times.weight_grad)
    work = float((times.forward + backward).sum() + again)
    return point.microbatches * work / layout.pp + _least_wait(space, point, times)


def _least_wait(space: Space, point: Point, times: LayerTimes) -> float:
    """Return a bound on the seconds that the ranks wait for their first op, in the mean over the ranks.

    If at most c ranks have a copy of a stage, at most c (k + 1) ranks start at one of the stages 0 to k. So the n-th rank to
    start waits at least for the forwards of n // c stages, the first with the embedding, the others with at least a block.
    """
    pp, roles = point.layout.pp, times.table.roles
    copies = space.copies(pp, point.microbatches)
    front = roles.index("block")
    block = min(float(time) for time, role in zip(times.forward, roles, strict=True) if role == "block")
    first = float(times.forward[:front].sum()) if front else block
    waits = [rank // copies for rank in range(pp)]
    return sum(first + (stages - 1) * block for stages in waits if stages) / pp


def least_placed_bytes(space: Space, layout: Layout, placement: Placement, costs: StageCosts) -> float:
    """Return the bytes that the fullest device needs at least with a placement of the stages; of unlike ones, its share.

    A microbatch is on all stages of a rank before its first backward. Copies of a stage may take different microbatches at
    different times, so only the largest of their stages counts.
    """
    dtype = dtype_of(space.profile, space.cluster, layout)
    held = work_shares(placement) > 0
    sharding, states = layout.sharding, states_of(layout, dtype)
    state = held @ (states.device_bytes(costs.counts_of_parameters) + states.on_device(costs.frozen_bytes))
    if sharding.comes_and_goes:
        # The stage of the first backward has its weights and gradients in full.
        full = states.gradient * costs.parameters
        if sharding.weights_come_and_go:
            full = full + states.moving_weights(costs)
        state += np.where(held, full, np.inf).min(axis=1)
    alone = all(len(ranks) == 1 for ranks in placement.holders)
    saved = held @ costs.saved if alone else (held * costs.saved).max(axis=1)
    return float(((state + saved) / space.limits(layout)).max())


def seconds_after_pipeline(space: Space, layout: Layout, placement: Placement, costs: StageCosts) -> float:
    """Return the seconds that a step takes at least after the pipeline's last op, however they are sharded."""
    cluster = space.cluster
    dtype = dtype_of(space.profile, cluster, layout)
    blocking = not overlaps(cluster, layout)
    return (
        cluster.step_overhead
        + space.profile.step_overhead
        + min(
            states.update_seconds(costs, cluster, placement)
            + (states.reduction_after(costs, cluster, placement) if blocking else 0.0)
            for states in (states_of(variant, dtype) for variant in space.variants(layout) or (layout,))
        )
    )
