"""Proof that a schedule has every op once, in an order that its data allow, and cannot deadlock.

Invalid schedules are rejected with the offending ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from penstock.base.counts import describe_size, plural
from penstock.base.errors import ScheduleError
from penstock.schedule.index import index, rank_column
from penstock.schedule.memory import Budget, peak
from penstock.schedule.ops import Kind
from penstock.schedule.program import Program, lower
from penstock.schedule.residency import Sharding, make_residency
from penstock.schedule.schedule import Schedule

SHOWN = 8
"""Problems that a message lists."""
_MISSING = 10_000_000  # with more missing forwards than this, they are counted and not listed


@dataclass(frozen=True, eq=False)
class Proof:
    """Result of checking a schedule.

    Attributes:
        program: the Program of the schedule; its levels are an execution order that respects every wait.
        ops: number of ops, a pair counting as two.
        critical_path: length of the longest chain of ops that wait for each other, in ops.
    """

    program: Program
    ops: int
    critical_path: int

    def __str__(self) -> str:
        """Return what was proved, with the peak of every rank in activations."""
        return self.summary(peak(self.program.schedule).tolist(), "activations")

    def __repr__(self) -> str:
        return f"Proof({self.program.schedule!r}, critical path of {self.critical_path} ops)"

    def summary(self, peaks: Sequence[int], unit: str) -> str:
        """Return what was proved, as lines of text.

        Args:
            peaks: largest amount that each rank holds.
            unit: unit of the amounts, such as "bytes".
        """
        schedule, edges = self.program.schedule, self.program.edges.values()
        kinds = np.bincount(schedule.kind, minlength=len(Kind))
        counts = ", ".join(f"{kinds[kind]:,} {kind.name}" for kind in Kind if kinds[kind])
        messages = sum(len(edge.consumers) for edge in edges)
        pairs = np.count_nonzero(schedule.paired)
        counts += f", {pairs:,} pairs" if pairs else ""
        lines = [
            f"{schedule.name}: {describe_size(schedule.ranks, schedule.stages, schedule.microbatches)}: valid",
            f"{self.ops:,} ops ({counts}), each once and after its inputs; the longest chain of waits has "
            f"{self.critical_path:,} ops",
            f"{messages:,} messages between ranks; no deadlock, even if every send blocks; "
            f"at most {max((edge.slots for edge in edges), default=0)} receives posted ahead on an edge",
            f"peak {unit} {'on every rank' if len(set(peaks)) == 1 else 'by rank'}: {brief(peaks)}",
        ]
        if schedule.placement.has_copies:
            lines.append("every copied stage is reduced once on each of its ranks")
        if (residency := self.program.residency) is not None:
            lines.append(residency.summary())
        if not schedule.in_order:
            lines.append(
                "gradients are not summed in the order of the microbatches, so a run equals plain PyTorch to rounding only"
            )
        return "\n".join([*lines, *schedule.notes])


def check(
    schedule: Schedule,
    *,
    forward_only: bool = False,
    budget: Budget | None = None,
    sharding: Sharding | None = None,
) -> Proof:
    """Prove that a schedule is complete, ordered along its data dependencies, and cannot deadlock.

    It cannot deadlock even if every send blocks until its receive is posted, and every reduction until all holders of
    the stage have come to it; see `program`.

    Args:
        forward_only: whether the schedule is an evaluation and must have forwards alone (default False).
        budget: limit on the memory of every rank (default: none).
        sharding: what replicas divide, and when the Program gathers and reduces it (default: none is divided).

    Raises:
        ScheduleError: if ops are missing, misplaced or out of order, if ranks wait for each other in a cycle, or if an
            op exceeds the budget. The message names the ops, the shortest cycle, or the first op over the budget.
    """
    if schedule.stages * schedule.microbatches > len(schedule) + _MISSING:
        raise ScheduleError(
            f"{schedule.name} is not a valid schedule: {len(schedule)} ops are too few for a forward of each of "
            f"{plural(schedule.microbatches, 'microbatch')} on each of {plural(schedule.stages, 'stage')}"
        )
    # In this order: each check indexes tables by numbers that the checks before it have found to exist.
    for find in (_strays, _counts, _pairs, _order):
        problems = list(_first(find(schedule, forward_only)))
        if problems:
            raise ScheduleError(f"{schedule.name} is not a valid schedule: " + "; ".join(problems))
    program = lower(schedule)
    # Ops that never became ready; see `levels` in `penstock.schedule.program`.
    stuck = np.flatnonzero(program.level == 0)
    if len(stuck):
        raise ScheduleError(f"{schedule.name} deadlocks: {_cycle(program)}")
    if schedule.placement.has_copies:
        _reductions(program)
    if sharding is not None and sharding.comes_and_goes:
        program = replace(program, residency=make_residency(schedule, sharding))
    if budget is not None:
        _memory(program, budget)
    return Proof(program, len(schedule), int(program.level.max()))


def brief(amounts: Sequence[int]) -> str:
    """Return one number per rank: the first and last of many ranks, and a single one if all are equal."""
    if len(set(amounts)) == 1:
        return str(amounts[0])
    shown = [str(amount) for amount in amounts]
    return " ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]])


def _first(problems: Iterator[str]) -> Iterator[str]:
    for n, problem in enumerate(problems):
        if n == SHOWN:
            yield "and more"
            return
        yield problem


def _strays(schedule: Schedule, forward_only: bool) -> Iterator[str]:
    """Describe ops of a stage or microbatch that does not exist, or on a rank that does not hold the stage."""
    s, m = schedule.stages, schedule.microbatches
    outside = np.zeros(len(schedule), np.bool_)
    for column, count in ((schedule.stage, s), (schedule.microbatch, m), (schedule.kind, Kind.R + 1)):
        outside |= (column < 0) | (column >= count)
    for row in np.flatnonzero(outside):
        yield (
            f"row {row} (stage {schedule.stage[row]}, kind {schedule.kind[row]}, microbatch "
            f"{schedule.microbatch[row]}) is outside stages 0..{s - 1}, microbatches 0..{m - 1}"
        )
        # One is enough, and what follows indexes by these numbers.
        return
    # Holder by holder: a table of ranks x stages would outgrow the ops of many ranks.
    rank = rank_column(schedule)
    strays = np.ones(len(schedule), np.bool_)
    for holder in zip_longest(*schedule.placement.holders, fillvalue=-1):
        strays &= np.array(holder, np.int32)[schedule.stage] != rank
    for row in np.flatnonzero(strays):
        held = list(schedule.placement.holders[schedule.stage[row]])
        yield f"{schedule.op(row)} is on rank {rank[row]}, but its stage is on rank(s) {held}"
    for idle in np.flatnonzero(np.diff(schedule.offsets) == 0):
        yield f"rank {idle} holds stage(s) {list(schedule.placement.stages_of[idle])} but has no op"
    if forward_only:
        for row in np.flatnonzero(schedule.kind != Kind.F):
            yield f"{schedule.op(row)} appears in a schedule of forwards only"


def _counts(schedule: Schedule, forward_only: bool) -> Iterator[str]:
    """Describe ops that are missing or appear more than once."""
    shape = (schedule.stages, schedule.microbatches)
    # The product may exceed the int32 of the columns.
    cell = schedule.stage.astype(np.int64) * shape[1] + schedule.microbatch
    size = shape[0] * shape[1]
    count = {k: np.bincount(cell[schedule.kind == k], minlength=size) for k in Kind}

    def name(kind: str, where: np.signedinteger[Any]) -> str:
        return f"{where // shape[1]}{kind}{where % shape[1]}"

    for kind in Kind:
        for where in np.flatnonzero(count[kind] > 1):
            times = count[kind][where]
            yield f"{name(kind.name, where)} appears {'twice' if times == 2 else f'{times} times'}"
    full, inputs, weights = count[Kind.B] > 0, count[Kind.I] > 0, count[Kind.W] > 0
    forward, backward = count[Kind.F] > 0, full | inputs | weights
    there = forward if forward_only else np.concatenate([forward, backward])
    # Of a microbatch with few ops, those that are there are named: they are what is wrong.
    share = there.reshape(-1, shape[1]).mean(axis=0)
    few = (share > 0) & (share < 0.5)
    for microbatch in np.flatnonzero(few):
        rows = np.flatnonzero(schedule.microbatch == microbatch)
        named = ", ".join(str(schedule.op(row)) for row in rows[:SHOWN])
        yield (
            f"microbatch {microbatch} has only {named}{', ...' if len(rows) > SHOWN else ''}, but needs a forward "
            f"{'' if forward_only else 'and a backward '}on {plural(shape[0], 'stage')}"
        )
    many = ~np.tile(few, shape[0])
    for where in np.flatnonzero(~forward & many):
        yield f"{name('F', where)} is missing"
    if forward_only:
        return
    for where in np.flatnonzero(~backward & many):
        yield f"{name('B', where)} is missing (or {name('I', where)} and {name('W', where)})"
    for where in np.flatnonzero(full & (inputs | weights)):
        half = "I" if inputs[where] else "W"
        yield (
            f"{name('B', where)} and {name(half, where)} both appear: one backward too many; if B means the input "
            "gradient, write I"
        )
    for where in np.flatnonzero(~full & inputs & ~weights):
        yield f"{name('W', where)} is missing ({name('I', where)} is there)"
    for where in np.flatnonzero(~full & ~inputs & weights):
        yield f"{name('I', where)} is missing ({name('W', where)} is there)"


def _pairs(schedule: Schedule, forward_only: bool) -> Iterator[str]:
    """Describe pairs that are not a forward and then a backward on the same rank."""
    last = np.zeros(len(schedule), np.bool_)
    last[schedule.offsets[1:][np.diff(schedule.offsets) > 0] - 1] = True
    first = np.flatnonzero(schedule.paired & ~last)
    fits = (
        (schedule.kind[first] == Kind.F)
        & ((schedule.kind[first + 1] == Kind.B) | (schedule.kind[first + 1] == Kind.I))
        & ~schedule.paired[first + 1]
    )
    for row in np.flatnonzero(schedule.paired & last):
        yield f"{schedule.op(row)} is marked as a pair, but no op follows it on its rank"
    for row in first[~fits]:
        yield (
            f"{schedule.op(row)} and {schedule.op(row + 1)} are marked as a pair; a pair is a forward and then a "
            "backward"
        )


def _order(schedule: Schedule, forward_only: bool) -> Iterator[str]:
    """Describe ops of one stage and microbatch that are on different ranks or out of order."""
    if forward_only:
        return
    where = index(schedule)
    rank = rank_column(schedule)
    steps = [(where.forward, where.backward)]
    if where.weight is not None:
        # No other rank needs a weight gradient, so W may come any time after its I.
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
        # The forward and backward of a pair run at once, so a pair's backward cannot need its own forward.
        late = ~apart & ((first >= then) | (schedule.paired[first] & (then == first + 1)))
        for a, b in zip(first[late], then[late], strict=True):
            yield f"{schedule.op(b)} on rank {rank[b]} does not come after {schedule.op(a)}"


def _reductions(program: Program) -> None:
    """Assert that every holder reduces each stage once, after its last gradient, and all in the same order."""
    order: list[list[int]] = []
    for rank in range(program.schedule.ranks):
        done = [(stage, row) for row, stages in program.reductions_after(rank).items() for stage in stages]
        order.append([stage for stage, _ in done])
        held = set(program.schedule.placement.stages_of[rank]) & set(program.reductions)
        assert sorted(order[rank]) == sorted(held), f"rank {rank} reduces {order[rank]}, not {held} once each"
        for stage, row in done:
            assert row >= program.last_gradient_rows.get((rank, stage), row), f"{stage} is reduced too early"
    place = {stage: (step, stage) for stage, step in program.reduction_steps.items()}
    assert all(stages == sorted(stages, key=place.__getitem__) for stages in order), (
        "the holders reduce in different orders"
    )


def _memory(program: Program, budget: Budget) -> None:
    """Raise `ScheduleError` if a rank ever holds more than the budget."""
    schedule = program.schedule
    limits = budget.limits(schedule.ranks)
    held = budget.held(schedule, program.residency)
    over = np.flatnonzero(held > limits[program.rank])
    if not len(over):
        return
    least = budget.least(schedule)
    # The op that comes first in time, not the one on the lowest rank.
    row = int(over[np.argmin(program.level[over])])
    rank = int(program.rank[row])
    problem = (
        f"{schedule.name} does not fit in memory: rank {rank} holds {held[row]} after {schedule.op(row)}, "
        f"op {row - schedule.rows(rank).start + 1} of its list, and may hold {limits[rank]}"
    )
    if (least > limits).any():
        tight = int(np.argmax(least - limits))
        raise ScheduleError(
            f"{problem}; no order can meet the limit: one microbatch alone takes {least[tight]} on rank {tight}, "
            f"so {least.max()} is the least"
        )
    if budget.weights is not None:
        raise ScheduleError(
            f"{problem} with weights and gradients; activations alone can be as little as {least[rank]} there"
        )
    raise ScheduleError(f"{problem}; running one microbatch after the other would take {least.max()}")


def _cycle(program: Program) -> str:
    """Describe the shortest cycle of ranks that wait for each other, with the ops."""
    schedule = program.schedule
    waits: dict[int, list[tuple[int, int]]] = {}
    for rank in range(schedule.ranks):
        rows = schedule.rows(rank)
        stuck = np.flatnonzero(program.level[rows] == 0)
        if len(stuck):
            row = rows.start + int(stuck[0])
            group = (row, row + 1) if schedule.paired[row] else (row,)
            sources = [(k, int(program.source[k])) for k in group]
            waits[rank] = [(k, s) for k, s in sources if s >= 0 and program.level[s] == 0]
    # An empty way is not a cycle: its rank waits for ranks of a cycle, and is not on one.
    cycle = min(
        (_way_back(rank, waits, program) for rank in waits), key=lambda way: (len(way) == 0, len(way))
    )
    return " <- ".join(
        f"rank {program.rank[row]} is blocked at {schedule.op(row)}, which needs {schedule.op(awaited)} "
        f"of rank {program.rank[awaited]}"
        for row, awaited in cycle
    )


def _way_back(start: int, waits: dict[int, list[tuple[int, int]]], program: Program) -> list[tuple[int, int]]:
    """Return the fewest waits that lead from a rank back to itself, empty if none do."""
    ways: dict[int, list[tuple[int, int]]] = {start: []}
    todo = [start]
    for rank in todo:
        for row, awaited in waits[rank]:
            other = int(program.rank[awaited])
            if other == start:
                return [*ways[rank], (row, awaited)]
            if other not in ways:
                ways[other] = [*ways[rank], (row, awaited)]
                todo.append(other)
    return []
