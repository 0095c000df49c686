"""Is this schedule right: every op there once, in an order its data allow, and free of deadlock.

`check` either returns a `Proof` or raises with the ops that break it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.index import index, rank_column
from penstock.schedule.ops import Kind
from penstock.schedule.program import Program, lower
from penstock.schedule.schedule import Schedule

SHOWN = 8


@dataclass(frozen=True, eq=False)
class Proof:
    """What was proved of a schedule.

    Attributes:
        program: the Program it lowers to; its levels are an execution order that respects every wait.
        ops: how many ops there are, a pair counting as two.
        critical_path: the longest chain of ops that wait for each other, in ops.
    """

    program: Program
    ops: int
    critical_path: int


def check(schedule: Schedule, *, forward_only: bool = False) -> Proof:
    """Prove that a schedule is complete, ordered along its data dependencies, and cannot deadlock.

    The deadlock proof holds even when every send blocks until its receive is posted: see `program`.

    Args:
        schedule: what to check.
        forward_only: the schedule is an evaluation: forwards and nothing else.

    Raises:
        ScheduleError: names the ops that are wrong, or the ops of the cycle.
    """
    for find in (_strays, _counts, _pairs, _order):
        problems = list(_first(find(schedule, forward_only)))
        if problems:
            raise ScheduleError(f"{schedule.name} is no valid schedule: " + "; ".join(problems))
    program = lower(schedule)
    stuck = np.flatnonzero(program.level == 0)
    if len(stuck):
        raise ScheduleError(f"{schedule.name} deadlocks: {_cycle(program)}")
    return Proof(program, len(schedule), int(program.level.max()))


def _first(problems: Iterator[str]) -> Iterator[str]:
    for n, problem in enumerate(problems):
        if n == SHOWN:
            yield "and more"
            return
        yield problem


def _strays(schedule: Schedule, forward_only: bool) -> Iterator[str]:
    """Ops of a stage or microbatch that is not there, or on a rank that does not hold the stage."""
    s, m = schedule.stages, schedule.microbatches
    for row in np.flatnonzero(
        (schedule.stage < 0) | (schedule.stage >= s)
        | (schedule.microbatch < 0) | (schedule.microbatch >= m)
        | (schedule.kind < 0) | (schedule.kind > Kind.R)
    ):  # fmt: skip
        yield (
            f"row {row} (stage {schedule.stage[row]}, kind {schedule.kind[row]}, microbatch "
            f"{schedule.microbatch[row]}) is outside stages 0..{s - 1}, microbatches 0..{m - 1}"
        )
        return
    holds = np.zeros((schedule.ranks, s), np.bool_)
    for stage, ranks in enumerate(schedule.placement.holders):
        holds[list(ranks), stage] = True
    rank = rank_column(schedule)
    for row in np.flatnonzero(~holds[rank, schedule.stage]):
        held = list(schedule.placement.holders[schedule.stage[row]])
        yield f"{schedule.op(row)} is on rank {rank[row]}, but its stage is on rank(s) {held}"
    if forward_only:
        for row in np.flatnonzero(schedule.kind != Kind.F):
            yield f"{schedule.op(row)} stands in a schedule of forwards only"


def _counts(schedule: Schedule, forward_only: bool) -> Iterator[str]:
    """Ops that are missing or stand more than once."""
    shape = (schedule.stages, schedule.microbatches)
    cell = schedule.stage.astype(np.int64) * shape[1] + schedule.microbatch
    size = shape[0] * shape[1]
    count = {k: np.bincount(cell[schedule.kind == k], minlength=size) for k in Kind}

    def name(kind: str, where: np.signedinteger[Any]) -> str:
        return f"{where // shape[1]}{kind}{where % shape[1]}"

    for kind in Kind:
        for where in np.flatnonzero(count[kind] > 1):
            yield f"{name(kind.name, where)} stands {count[kind][where]} times"
    for where in np.flatnonzero(count[Kind.F] == 0):
        yield f"{name('F', where)} is missing"
    if forward_only:
        return
    full, inputs, weights = count[Kind.B] > 0, count[Kind.I] > 0, count[Kind.W] > 0
    for where in np.flatnonzero(~full & ~inputs & ~weights):
        yield f"{name('B', where)} is missing (or {name('I', where)} and {name('W', where)})"
    for where in np.flatnonzero(full & (inputs | weights)):
        half = "I" if inputs[where] else "W"
        yield f"{name('B', where)} stands beside {name(half, where)}: one backward too many"
    for where in np.flatnonzero(~full & inputs & ~weights):
        yield f"{name('W', where)} is missing ({name('I', where)} is there)"
    for where in np.flatnonzero(~full & ~inputs & weights):
        yield f"{name('I', where)} is missing ({name('W', where)} is there)"


def _pairs(schedule: Schedule, forward_only: bool) -> Iterator[str]:
    """Pairs that are not a forward and then a backward on the same rank."""
    rank = rank_column(schedule)
    for row in np.flatnonzero(schedule.paired):
        follows = row + 1 < len(schedule) and rank[row + 1] == rank[row]
        if not follows:
            yield f"{schedule.op(row)} is marked as a pair, but no op follows it on its rank"
        elif (
            schedule.kind[row] != Kind.F
            or schedule.kind[row + 1] not in (Kind.B, Kind.I)
            or schedule.paired[row + 1]
        ):
            yield (
                f"{schedule.op(row)} and {schedule.op(row + 1)} are marked as a pair; a pair is a "
                "forward and then a backward"
            )


def _order(schedule: Schedule, forward_only: bool) -> Iterator[str]:
    """Ops of one stage and microbatch on different ranks, or before what they need on their rank."""
    if forward_only:
        return
    where = index(schedule)
    rank = rank_column(schedule)
    steps = [(where.forward, where.backward)]
    if where.weight is not None:
        steps.append((where.backward, where.weight))
    if len(again := np.flatnonzero(schedule.kind == Kind.R)):
        recompute = np.full_like(where.forward, -1)
        recompute[schedule.stage[again], schedule.microbatch[again]] = again
        steps += [(where.forward, recompute), (recompute, where.backward)]
    for before, after in steps:
        both = (before >= 0) & (after >= 0)
        first, then = before[both], after[both]
        apart = rank[first] != rank[then]
        for a, b in zip(first[apart], then[apart], strict=True):
            yield (
                f"{schedule.op(a)} is on rank {rank[a]} but {schedule.op(b)} on rank {rank[b]}; "
                "the saved activations are where the forward ran"
            )
        # Both halves of a pair run at once, so a pair's backward cannot need its own forward.
        late = ~apart & ((first >= then) | (schedule.paired[first] & (then == first + 1)))
        for a, b in zip(first[late], then[late], strict=True):
            yield f"{schedule.op(b)} on rank {rank[b]} does not come after {schedule.op(a)}"


def _cycle(program: Program) -> str:
    """The shortest story of a deadlock: which rank waits at which op for which, round in a circle."""
    schedule = program.schedule
    front: dict[int, int] = {}
    for rank in range(schedule.ranks):
        rows = schedule.rows(rank)
        stuck = np.flatnonzero(program.level[rows] == 0)
        if len(stuck):
            front[rank] = rows.start + int(stuck[0])

    def waits_for(row: int) -> tuple[int, int]:
        group = (row, row + 1) if schedule.paired[row] else (row,)
        blocked = next(k for k in group if program.source[k] >= 0 and program.level[program.source[k]] == 0)
        return blocked, int(program.source[blocked])

    chain: list[int] = []
    rank = next(iter(front))
    while rank not in chain:
        chain.append(rank)
        rank = int(program.rank[waits_for(front[rank])[1]])
    lines = []
    for member in chain[chain.index(rank) :]:
        row, awaited = waits_for(front[member])
        lines.append(
            f"rank {member} stands at {schedule.op(row)}, which needs {schedule.op(awaited)} "
            f"of rank {program.rank[awaited]}"
        )
    return " <- ".join(lines)
