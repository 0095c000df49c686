"""How one rank's backwards run: whole or in halves, and after a forward that dropped everything."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from penstock.schedule.ops import Kind, Op
from penstock.schedule.program import Program


class Backwards(NamedTuple):
    """What the executor has to know of each.

    Attributes:
        merged: I whose W follows at once and for whose result nobody waits: one full backward is cheaper than two
            halves.
        split: (stage, microbatch) whose backward comes in two halves.
        dropped: (stage, microbatch) that an R computes again, so that its forward keeps the inputs only.
    """

    merged: frozenset[Op]
    split: frozenset[tuple[int, int]]
    dropped: frozenset[tuple[int, int]]

    @staticmethod
    def of(program: Program, rank: int) -> Backwards:
        """Those of one rank."""
        schedule, rows = program.schedule, program.schedule.rows(rank)
        inputs = [r for r in range(rows.start, rows.stop) if schedule.kind[r] == Kind.I]
        merged = frozenset(
            schedule.op(r)
            for r in inputs
            if r + 1 < rows.stop
            and program.target[r] < 0
            and schedule.op(r + 1) == replace(schedule.op(r), kind=Kind.W)
        )
        halves = [op for op in map(schedule.op, inputs) if op not in merged]
        again = [schedule.op(r) for r in range(rows.start, rows.stop) if schedule.kind[r] == Kind.R]
        return Backwards(
            merged,
            frozenset((op.stage, op.microbatch) for op in halves),
            frozenset((op.stage, op.microbatch) for op in again),
        )
