"""Progress of every rank in a few numbers, for the report when something goes wrong.

A rank writes its step, the row of its op, and the rank whose message it waits for. That costs one store an op and two a
wait. When a wait times out, the numbers of all ranks show which one keeps the others waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.schedule.program import Program

# Behind the names of the last calls there is room for what `peers` keeps at the end of a page.
STEP, ROW, WAITS, CALLS, FIELDS = 0, 1, 2, 3, 16
"""Indices of the step (0 between steps), the row of the running op, 1 + the awaited rank (0 if none), and the number of
collective calls, after which the last `KEPT` of these follow; their number."""
KEPT = 8
"""Calls whose names are kept; ranks are only a few calls apart, since a step ends when all of them agree."""
END = -1
"""Row after the last op, while the step ends."""


class RankProgress(Protocol):
    """The numbers of one rank: a list, or memory shared with other processes."""

    def __getitem__(self, index: int) -> int: ...
    def __setitem__(self, index: int, value: int) -> None: ...


def new_progress() -> list[int]:
    """Return the numbers of a rank, visible to this process alone."""
    return [0] * FIELDS


CLOSE = "pipe.close()"
CALL_NAMES = (
    "pipe.step()",
    "pipe.evaluate()",
    "pipe.log_probs()",
    "pipe.full_state_dict()",
    "pipe.named_weights()",
    "pipe.clip_grad_norm_()",
    "pipe.sum_over_ranks()",
    "pipe.gather_trace()",
    "pipe.report()",
    "pipe.gather_expert_load()",
    "pipe.gather_weights()",
    CLOSE,
    "PipelineOptimizer()",
    "PipelineOptimizer.step()",
    "Checkpoints()",
    "Checkpoints.save()",
    "Checkpoints.load()",
    "Checkpoints.load_newest()",
)
"""Calls that all ranks of a pipeline make together."""


def record_call(progress: RankProgress, name: str) -> None:
    """Record that a rank makes its next collective call."""
    number = progress[CALLS] + 1
    progress[CALLS + 1 + number % KEPT] = CALL_NAMES.index(name)
    progress[CALLS] = number  # last, so that a process that reads the number finds the name


def call_of(progress: RankProgress, number: int) -> str:
    """Return the name of a rank's call with this number; empty if it has not made it, or long ago."""
    if not 0 <= progress[CALLS] - number < KEPT or not number:
        return ""
    return CALL_NAMES[progress[CALLS + 1 + number % KEPT]]


def other_calls(calls: Mapping[int, str]) -> str:
    """Say which ranks make which calls, where all should make the same."""
    by_name: dict[str, list[int]] = {}
    for rank in sorted(calls):
        by_name.setdefault(calls[rank], []).append(rank)
    who = [
        f"rank {ranks[0]} calls {name}"
        if len(ranks) == 1
        else f"ranks {', '.join(map(str, ranks))} call {name}"
        for name, ranks in by_name.items()
    ]
    ended = ". A rank that closes its pipeline has ended its loop, or failed" if CLOSE in by_name else ""
    return (
        f"{', but '.join(who)}; every rank must make the same calls of the pipeline in the same order, not within "
        f"`if pipe.is_main:` or `if pipe.rank == 0:`{ended}"
    )


def describe_progress(program: Program, progress: RankProgress) -> str:
    """Describe where a rank is: its step, and the op with its stage and microbatch."""
    step, row = progress[STEP], progress[ROW]
    if not step:
        return "between two steps"
    schedule = program.schedule
    if not 0 <= row < len(schedule.stage):
        return f"at the end of step {step}"
    op = schedule.op(row)
    return f"in op {op} (stage {op.stage}, microbatch {op.microbatch}) of step {step}"


def rows_of(program: Program, row: int) -> range:
    """Return the rows of the op that begins at `row`: two for a fused pair, else one."""
    return range(row, row + 1 + bool(program.schedule.paired[row]))


def awaited_output(program: Program, row: int, peer: int) -> str:
    """Name the op of rank `peer` whose output the op at `row` takes; empty if there is none."""
    if not 0 <= row < len(program.rank):
        return ""
    for producer, _ in [sender for r in rows_of(program, row) for sender in program.producers(r)]:
        if int(program.rank[producer]) == peer:
            op = program.schedule.op(producer)
            return f"op {op} (stage {op.stage}, microbatch {op.microbatch})"
    return ""


def blocking_rank(rank: int, progress: Sequence[RankProgress | None]) -> int:
    """Follow the waits from an awaited rank to the rank that does not wait itself."""
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        current = progress[rank]
        awaited = current[WAITS] - 1 if current is not None else -1
        if not 0 <= awaited < len(progress):
            return rank
        rank = awaited
    return rank
