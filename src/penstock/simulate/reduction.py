"""Reduction of gradients over replicas in a simulated step, and the part of it that is exposed.

A rank reduces while it computes. A stage's gradients become complete during its last weight gradient (the last B or W of
the stage on that rank), bucket by bucket: the n-th of k buckets when n/k of that op is done. Buckets are reduced one after
the other. A reduction hides in later ops and in the cool-down. The part after the rank's last op is exposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.base.errors import ConfigError
from penstock.schedule.program import Program
from penstock.trace.events import Activity, Trace, with_events


@dataclass(frozen=True)
class Reductions:
    """Reductions of one step; times in the trace's unit."""

    trace: Trace  # trace of the step with an event of kind REDUCE for every bucket
    exposed: tuple[Any, ...]  # time from each rank's last op to the end of its last reduction
    total: tuple[Any, ...]  # time that each rank's reductions take


def reduce_gradients(
    program: Program, trace: Trace, seconds: Sequence[Any], buckets: int | Mapping[int, int] = 1
) -> Reductions:
    """Add the reductions to a simulated step.

    `seconds` are for the gradients of each stage. `buckets` divide them equally: one number, or a mapping by stage (1
    for a stage that it lacks).
    """
    stages = program.schedule.stages
    if len(seconds) != stages or not all(s >= 0 for s in seconds):
        raise ConfigError(
            f"reductions take one time of at least 0 for each of the {stages} stages, got {list(seconds)}"
        )
    counts = buckets if isinstance(buckets, Mapping) else dict.fromkeys(range(stages), buckets)
    if any(n < 1 for n in counts.values()):
        raise ConfigError(f"buckets must be at least 1, got {buckets!r}")
    rows: list[tuple[int, int, Activity, Any, Any]] = []
    exposed: list[Any] = []
    total: list[Any] = []
    for rank, events in enumerate(trace.rank_slices()):
        local = trace.select(events)
        # A zero of the trace's type, so that whole times stay whole.
        zero = local.end.dtype.type(0)
        complete = [
            (begin + (end - begin) * (n + 1) / count, stage, seconds[stage] / count)
            for stage, (begin, end) in _last_gradients(local).items()
            for count in [counts.get(stage, 1)]
            for n in range(count)
        ]
        clock = zero
        for ready, stage, duration in sorted(complete):
            start = max(ready, clock)
            clock = start + duration
            rows.append((rank, stage, Activity.REDUCE, start, clock))
        exposed.append(max(clock - local.end.max(initial=zero), zero))
        total.append(sum((duration for *_, duration in complete), zero))
    # The trace counts a layout's memory no more once gradients have more than one place.
    merged = with_events(replace(trace, held=None) if rows else trace, rows)
    return Reductions(merged, tuple(exposed), tuple(total))


def _last_gradients(local: Trace) -> dict[int, tuple[Any, Any]]:
    """Return stage → (start, end) of its last B or W on one rank."""
    last: dict[int, tuple[Any, Any]] = {}
    for row in np.flatnonzero((local.kind == Activity.B) | (local.kind == Activity.W)):
        last[int(local.stage[row])] = (local.start[row], local.end[row])
    return last
