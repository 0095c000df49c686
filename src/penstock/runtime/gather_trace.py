"""The trace of a measured step: one of each process, and one of all ranks, on one clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from penstock.base import host
from penstock.base.encoding import sendable
from penstock.parallel.clocks import Readings
from penstock.runtime.executor import Executor
from penstock.runtime.workers.world import World
from penstock.trace.events import Activity, Trace, with_events
from penstock.trace.join import Alignment, align, join

# The tightest bounds of all meetings count (see `align`), so a few are enough.
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
    found = world.gather((host.clock(), meetings))
    return align([times for _, times in found], [clock_name for clock_name, _ in found])


def gather_trace(world: World, part: Trace) -> Trace:
    """Join the processes' traces of a step, with their clocks aligned; every rank calls it, after the step.

    Returns:
        The trace of the step, the same on every rank; ``info["clock_error"]`` is the largest error between the times of two
        ranks, in seconds.
    """
    clocks = align_clocks(world)
    return join(world.gather(part), clocks)


def measured_trace(executors: Sequence[Executor]) -> Trace:
    """Join the records of the executors of one process, on one clock; waits for their GPUs.

    Returns:
        The trace, with times in seconds from its first event; ``info["origin"]`` is that moment in seconds of
        ``time.perf_counter``. ``info["whole_backward"]`` names the layers whose backward could not be split, if any.
    """
    program = executors[0].program
    schedule = program.schedule
    rows = np.concatenate(
        [np.arange(schedule.rows(e.rank).start, schedule.rows(e.rank).stop) for e in executors]
    )
    readings = Readings()
    start = np.concatenate([readings.seconds(e.device, e.records.start) for e in executors])
    end = np.concatenate([readings.seconds(e.device, e.records.end) for e in executors])
    held = np.concatenate([_held(e) for e in executors])
    unsplit = {
        name for e in executors for stage in e.stages.values() for name in stage.split_checks.unsplit_layers
    }
    trace = Trace(
        ranks=schedule.ranks,
        rank=program.rank[rows],
        stage=schedule.stage[rows],
        kind=schedule.kind[rows],
        microbatch=schedule.microbatch[rows],
        start=start,
        end=end,
        paired=schedule.paired[rows],
        held=held,
        info={
            "source": "measured",
            "schedule": schedule.name,
            "ranks_present": [e.rank for e in executors],
            **({"whole_backward": sorted(unsplit)} if unsplit else {}),
        },
    )
    trace = with_events(trace, [row for e in executors for row in _collectives(e, readings)])
    origin = trace.start.min()
    return replace(
        trace,
        start=trace.start - origin,
        end=trace.end - origin,
        info={**trace.info, "origin": float(origin)},
    )


def _collectives(executor: Executor, readings: Readings) -> Iterator[tuple[int, int, Activity, float, float]]:
    """Yield rank, stage (-1 for what several have), kind, start and end of a rank's gathers and reductions."""
    for stage in dict.fromkeys(bucket.stage for bucket in executor.buckets):
        buckets = [bucket.spans for bucket in executor.buckets if bucket.stage == stage]
        for kind, spans_of in (
            (Activity.GATHER, [spans["unshard"] for spans in buckets]),
            (Activity.REDUCE, [spans["reduce"] for spans in buckets]),
        ):
            # A stage's n-th gather is the n-th of all its buckets that are gathered.
            for spans in zip(*filter(None, spans_of), strict=False):
                moments = readings.seconds(executor.device, [moment for span in spans for moment in span])
                at = -1 if stage is None else stage
                yield executor.rank, at, kind, float(moments.min()), float(moments.max())


def _held(executor: Executor) -> npt.NDArray[np.int64]:
    """Return the bytes a rank holds after each of its ops, summed over its stages; each record is of the op's stage."""
    rows = executor.program.schedule.rows(executor.rank)
    stages = executor.program.schedule.stage[rows]
    held = np.array(executor.records.held, np.int64)
    changes = np.zeros(len(held), np.int64)
    for stage in np.unique(stages):
        ops = np.flatnonzero(stages == stage)
        changes[ops] += np.diff(held[ops], prepend=0)
    return np.cumsum(changes)
