"""What every rank is doing, for whoever waits for it in vain.

A rank writes a few numbers as it goes: the step, the row of its op, and the rank whose message it waits for. That costs a
store an op and two a wait; they are read only when something is wrong, and then tell who keeps all others waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.schedule.program import Program

STEP, ROW, WAITS, WORDS = 0, 1, 2, 16
"""Places: the step, 0 between steps; the row of the op that runs; 1 + the rank that is waited for, or 0."""
END = -1
"""The row where all ops are done, and the step ends."""


class RankProgress(Protocol):
    """The numbers of one rank: a list, or memory that other processes see."""

    def __getitem__(self, at: int) -> int: ...
    def __setitem__(self, at: int, value: int) -> None: ...


def new_words() -> list[int]:
    """The numbers of a rank that only this process looks at."""
    return [0] * WORDS


def place_of(program: Program, words: RankProgress) -> str:
    """Where a rank is, in words: its step, and the op with its stage and microbatch."""
    step, row = words[STEP], words[ROW]
    if not step:
        return "between two steps"
    schedule = program.schedule
    if not 0 <= row < len(schedule.stage):
        return f"at the end of step {step}"
    op = schedule.op(row)
    return f"in op {op} (stage {op.stage}, microbatch {op.microbatch}) of step {step}"


def rows_of(program: Program, row: int) -> range:
    """The rows of the op that begins with one: two, if it is a fused pair."""
    return range(row, row + 1 + bool(program.schedule.paired[row]))


def awaited(program: Program, row: int, peer: int) -> str:
    """What an op takes from another rank, in words; empty if it is nothing of a stage's."""
    if not 0 <= row < len(program.rank):
        return ""
    for producer, _ in [sender for r in rows_of(program, row) for sender in program.producers(r)]:
        if int(program.rank[producer]) == peer:
            op = program.schedule.op(producer)
            return f"op {op} hands over (stage {op.stage}, microbatch {op.microbatch})"
    return ""


def culprit(rank: int, words: Sequence[RankProgress | None]) -> int:
    """Follow who waits for whom, from a rank that is waited for in vain, to the one that waits for nobody.

    Args:
        rank: who is waited for.
        words: by rank; None where they cannot be seen.
    """
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        here = words[rank]
        following = here[WAITS] - 1 if here is not None else -1
        if not 0 <= following < len(words):
            return rank
        rank = following
    return rank
