"""One trace of all ranks, from the traces of the processes, on one clock."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from penstock import host
from penstock.encoding import sendable
from penstock.runtime.workers.world import World
from penstock.trace.clock import Alignment, align
from penstock.trace.events import Trace
from penstock.trace.join import join

MEETINGS = 12

sendable(Trace)  # marked here, since `trace` must not import torch, and the encoding does


def align_clocks(world: World, clock: Callable[[], float] = perf_counter) -> Alignment:
    """Measure the offsets between the clocks of the processes; every rank calls it, with the same clock.

    Each meeting is one sum over all ranks, which no rank has before all ranks have contributed.

    Returns:
        Alignment, the same on every rank: the offset from each clock to rank 0's, and its error. The error is 0 on rank 0's
        machine, where all read one clock, and on others about half of the quickest meeting.
    """
    token = torch.zeros(1)
    meetings = []
    for _ in range(MEETINGS):
        arrival = clock()
        world.all_reduce(token)
        meetings.append((arrival, clock()))
    found = world.all_gather((host.clock(), meetings))
    return align([times for _, times in found], [clock_name for clock_name, _ in found])


def gather_trace(world: World, part: Trace) -> Trace:
    """Join the processes' traces of a step, with their clocks aligned; every rank calls it, after the step.

    Returns:
        The trace of the step, the same on every rank; ``info["clock_error"]`` is the largest error between the times of two
        ranks, in seconds.
    """
    clocks = align_clocks(world)
    return join(world.all_gather(part), clocks)
