"""The reduction of gradients over replicas in a simulated step: where it hides, and what of it is exposed.

A rank reduces on the side while it computes. A stage's gradients become complete during its last weight gradient (the
last B or W of the stage on that rank), bucket by bucket: the n-th of k buckets when n/k of that op is done. Buckets go
one after the other. A reduction hides in later ops and in the cool-down; what outlasts the rank's own last op is
exposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.schedule.program import Program
from penstock.trace.events import Activity, Trace


@dataclass(frozen=True)
class Reductions:
    """What the reductions of one step come to; times in the trace's unit.

    Attributes:
        trace: the step with an event of kind REDUCE for every bucket.
        exposed: by rank, how long the last reduction outlasts the rank's last op.
        total: by rank, the time its reductions take.
    """

    trace: Trace
    exposed: tuple[Any, ...]
    total: tuple[Any, ...]


def reduce_gradients(
    program: Program, trace: Trace, seconds: Sequence[Any], buckets: int | Mapping[int, int] = 1
) -> Reductions:
    """Put the reductions into a simulated step.

    Args:
        program: of the step.
        trace: as `simulate` made it.
        seconds: by stage, what reducing its gradients takes.
        buckets: into how many equal buckets a stage's gradients are cut: one number, or by stage (1 where not named).

    Raises:
        ConfigError: not one time a stage, a negative one, or a number of buckets below 1.
    """
    stages = program.schedule.stages
    if len(seconds) != stages or not all(s >= 0 for s in seconds):
        raise ConfigError(
            f"reductions take one time of at least 0 for each of the {stages} stages, not {list(seconds)}"
        )
    parts = buckets if isinstance(buckets, Mapping) else dict.fromkeys(range(stages), buckets)
    if any(n < 1 for n in parts.values()):
        raise ConfigError(f"gradients are cut into at least 1 bucket, not {buckets!r}")
    rows: list[tuple[int, int, Any, Any]] = []
    exposed: list[Any] = []
    total: list[Any] = []
    for rank, part in enumerate(trace.rank_slices()):
        own = trace.select(part)
        zero = own.end.dtype.type(0)
        complete = [
            (begin + (end - begin) * (n + 1) / count, stage, seconds[stage] / count)
            for stage, (begin, end) in _last_gradients(own).items()
            for count in [parts.get(stage, 1)]
            for n in range(count)
        ]
        clock = zero
        for ready, stage, long in sorted(complete):
            start = max(ready, clock)
            clock = start + long
            rows.append((rank, stage, start, clock))
        exposed.append(max(clock - own.end.max(initial=zero), zero))
        total.append(sum((long for *_, long in complete), zero))
    return Reductions(_merged(trace, rows), tuple(exposed), tuple(total))


def fewest_buckets(program: Program, trace: Trace, seconds: Sequence[Any], most: int = 16) -> dict[int, int]:
    """How finely each stage's gradients have to be cut: not at all where the reduction hides anyway.

    Args:
        program, trace, seconds: as for `reduce_gradients`.
        most: the most buckets of a stage.

    Returns:
        By stage, the fewest buckets (1, 2, 4 ... `most`) with which its ranks expose no more than with `most` everywhere.
    """
    found = dict.fromkeys(range(program.schedule.stages), most)
    least = reduce_gradients(program, trace, seconds, found).exposed
    for stage in range(program.schedule.stages):
        for count in (2**n for n in range(most.bit_length())):
            tried = {**found, stage: count}
            now = reduce_gradients(program, trace, seconds, tried).exposed
            if all(a <= b * (1 + 1e-9) for a, b in zip(now, least, strict=True)):
                found = tried
                break
    return found


def _last_gradients(own: Trace) -> dict[int, tuple[Any, Any]]:
    """Stage → (start, end) of the last B or W of one rank."""
    last: dict[int, tuple[Any, Any]] = {}
    for row in np.flatnonzero((own.kind == Activity.B) | (own.kind == Activity.W)):
        last[int(own.stage[row])] = (own.start[row], own.end[row])
    return last


def _merged(trace: Trace, rows: Sequence[tuple[int, int, Any, Any]]) -> Trace:
    """A trace with reductions added, sorted by rank and then by start."""
    if not rows:
        return trace
    rank, stage, start, end = (np.array(column) for column in zip(*rows, strict=True))
    whole = replace(
        trace,
        rank=np.concatenate([trace.rank, rank.astype(np.int32)]),
        stage=np.concatenate([trace.stage, stage.astype(np.int32)]),
        kind=np.concatenate([trace.kind, np.full(len(rows), Activity.REDUCE, np.int8)]),
        microbatch=np.concatenate([trace.microbatch, np.full(len(rows), -1, np.int32)]),
        start=np.concatenate([trace.start, start]),
        end=np.concatenate([trace.end, end]),
        paired=np.concatenate([trace.paired, np.zeros(len(rows), np.bool_)]),
        held=None,
    )
    return whole.select(np.lexsort((whole.start, whole.rank)))
