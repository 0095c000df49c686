"""Progress of every rank in a few numbers, for the report when something goes wrong.

A rank writes its step, the row of its op, and the rank whose message it waits for. That costs one store an op and two a
wait. When a wait times out, the numbers of all ranks show which one keeps the others waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.schedule.program import Program

STEP, ROW, WAITS, FIELDS = 0, 1, 2, 16
"""Indices of the step (0 between steps), the row of the running op, and 1 + the awaited rank (0 if none); their number."""
END = -1
"""Row after the last op, while the step ends."""


class RankProgress(Protocol):
    """The numbers of one rank: a list, or memory shared with other processes."""

    def __getitem__(self, index: int) -> int: ...
    def __setitem__(self, index: int, value: int) -> None: ...


def new_progress() -> list[int]:
    """Return the numbers of a rank, visible to this process alone."""
    return [0] * FIELDS


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
    """Follow the waits from an awaited rank to the rank that does not wait itself.

    Args:
        rank: rank that another rank waits for.
        progress: numbers by rank; None where they cannot be read.
    """
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        current = progress[rank]
        awaited = current[WAITS] - 1 if current is not None else -1
        if not 0 <= awaited < len(progress):
            return rank
        rank = awaited
    return rank
