"""The simulator: start and end of every op of a Program, given the costs of ops and messages.

Every rank runs its list strictly in order, and every op as soon as its rank is free and its input has arrived. Time never
changes the order, so one sweep over the ops yields all times: each op is touched once, and once more if it had to wait for
another rank. There is no queue of events, and so there are no ties to break.

If replicas shard weights or gradients (`penstock.schedule.residency`), each rank also has a link to the other replicas,
whose collectives follow each other in the order in which the executor begins them. A gather begins when the rank comes to
the row that it stands before, and an op that reads the weights waits for it: a forward once its input is there, as its
layers wait, and any other op before it receives. A reduction begins when its op is done, and the rank waits for it after
its next op, which gives its memory back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError, ScheduleError
from penstock.schedule.jit import choose
from penstock.schedule.memory import Bytes, held
from penstock.schedule.ops import Kind
from penstock.schedule.program import Program
from penstock.simulate.costs import Costs, Table
from penstock.trace.events import Activity, Trace, with_events

_KINDS = len(Kind)
_F, _W = int(Kind.F), int(Kind.W)


def simulate(program: Program, costs: Costs, memory: Bytes | None = None) -> Trace:
    """Time every op of a program, and the gathers and reductions of its residency if the costs have a price for them.

    The halves of a pair whose outputs leave early are events of their own, each as long as its op. If all costs are
    whole numbers, the times are int64 and exact; float64 otherwise. `memory`, as from `schedule.memory.held`, is what
    the trace says of each op's rank after the op; without it the trace counts chunks, freed at W.

    With gathers and reductions, ``info["exposed_gathers"]`` lists by rank the time by which ops begin later because their
    weights are not there, and ``info["exposed_reductions"]`` the time that the rank waits for reductions between two ops
    and after the last.
    """
    schedule = program.schedule
    costs.require_sums(schedule.stages, schedule.ranks, schedule.microbatches)
    start, end, shards = _times(program, costs)
    split_pairs = costs.pair_output == "early" and bool(schedule.paired.any())
    stuck = np.flatnonzero(end < 0)
    if len(stuck):
        raise ScheduleError(
            f"{schedule.name} deadlocks: {schedule.op(stuck[0])} on rank {program.rank[stuck[0]]} never runs; "
            "`penstock schedule check` shows the cycle"
        )
    trace = Trace(
        ranks=schedule.ranks,
        rank=program.rank,
        stage=schedule.stage,
        kind=schedule.kind,
        microbatch=schedule.microbatch,
        start=start,
        end=end,
        paired=np.zeros_like(schedule.paired) if split_pairs else schedule.paired,
        held=held(schedule) if memory is None else memory,
        info={
            "source": "simulated",
            "schedule": schedule.name,
            "stages": schedule.stages,
            "microbatches": schedule.microbatches,
            "held": "chunks" if memory is None else "bytes",
        },
    )
    return trace if shards is None else _with_collectives(trace, shards)


def _with_collectives(trace: Trace, shards: _Shards) -> Trace:
    rows = []
    for kind, offsets, stages, seconds, begins in (
        (Activity.GATHER, shards.gathers, shards.gathered, shards.gather, shards.gather_start),
        (Activity.REDUCE, shards.reductions, shards.reduced, shards.reduce, shards.reduce_start),
    ):
        # Both columns are in the order of the ops, whose ranks are ascending.
        ranks = np.repeat(trace.rank, np.diff(np.asarray(offsets))).tolist()
        rows += [
            (rank, stage, kind, begin, begin + seconds[stage])
            for rank, stage, begin in zip(ranks, stages, begins, strict=True)
        ]
    merged = with_events(trace, rows)
    gathers, reductions = np.asarray(shards.waits, trace.end.dtype).reshape(2, trace.ranks).tolist()
    return replace(merged, info={**merged.info, "exposed_gathers": gathers, "exposed_reductions": reductions})


class _Rows(NamedTuple):
    """Columns of the program, by row; offsets by rank. Arrays where the kernel is compiled, lists otherwise."""

    offsets: Any
    source: Any
    target: Any
    rank: Any
    paired: Any
    stage: Any
    kind: Any


class _Seconds(NamedTuple):
    """Costs as flat tables: ops by stage and kind, pairs by row, messages by boundary and link.

    Pairs are empty if there are none. Last is the node of each rank.
    """

    op: Any
    pair: Any
    transfer: Any
    node: Any


class _Rules(NamedTuple):
    """`Costs.pair_output` and `Communication.blocks` as flags."""

    early: bool
    sender_blocks: bool
    receiver_blocks: bool


class _Shards(NamedTuple):
    """Gathers and reductions, each kind in the order of the rows; arrays where the kernel is compiled, lists otherwise.

    Those before, or after, row k have the places ``offsets[k]`` to ``offsets[k + 1]`` in the other columns.
    """

    gathers: Any  # offsets
    gathered: Any  # stage of each
    gather: Any  # seconds by stage
    gather_start: Any  # a result, as are the start of each reduction and `waits`
    reductions: Any
    reduced: Any
    reduce: Any
    reduce_start: Any
    waits: Any  # time that ranks wait for gathers, then for reductions, shape (2 * ranks,)
    # Two numbers: places between a stage's gathers on one rank and on the next (0 if no other rank has the stage), and
    # whether reductions go the other way on the link, beside gathers.
    link: Any


class _Times(NamedTuple):
    """Results by row, -1 for ops that never run; `leave` is when the op's output is sent (its transfer begins)."""

    start: Any
    end: Any
    leave: Any


def _times(program: Program, costs: Costs) -> tuple[Table, Table, _Shards | None]:
    """Return start and end of every op, -1 for an op that never runs; and gathers and reductions with their times."""
    schedule, communication = program.schedule, costs.communication
    transfer = communication.transfer(schedule.stages)
    pair = _pair_seconds(program, costs)
    collectives = [np.zeros(0, np.int64) if each is None else each for each in (costs.gather, costs.reduce)]
    dtype = np.result_type(costs.seconds, transfer, pair, *collectives)
    of_ops = (schedule.paired, schedule.stage, schedule.kind)
    rows = _Rows(schedule.offsets, program.source, program.target, program.rank, *of_ops)
    tables = (costs.seconds, pair, transfer)
    flat = [np.ascontiguousarray(table, dtype).ravel() for table in tables]
    seconds = _Seconds(flat[0], flat[1], flat[2], communication.node(schedule.ranks))
    rules = _Rules(
        costs.pair_output == "early",
        communication.blocks in ("sender", "both"),
        communication.blocks in ("receiver", "both"),
    )
    start, end = (np.full(len(schedule), -1, dtype) for _ in range(2))
    shards = _shards(program, costs, dtype)
    # Unless senders block, an output leaves when its op ends, and one column serves for both.
    kernel = choose(_run, len(schedule))
    if kernel is _run:
        rows, seconds = _Rows(*(c.tolist() for c in rows)), _Seconds(*(c.tolist() for c in seconds))
        shards = shards and _Shards(*(column.tolist() for column in shards))
        begin, finish = start.tolist(), end.tolist()
        times = _Times(begin, finish, list(finish) if rules.sender_blocks else finish)
        kernel(rows, seconds, rules, times, shards)
        return np.array(begin, dtype), np.array(finish, dtype), shards
    kernel(rows, seconds, rules, _Times(start, end, end.copy() if rules.sender_blocks else end), shards)
    return start, end, shards


def _shards(program: Program, costs: Costs, dtype: Any) -> _Shards | None:
    """Return the gathers and reductions of a program, without times; None if it has none or they have no price."""
    residency, schedule = program.residency, program.schedule
    if residency is None or (costs.gather is None and costs.reduce is None):
        return None
    columns: list[npt.NDArray[Any]] = []
    for table, by_row in ((costs.gather, residency.unshards), (costs.reduce, residency.reduces)):
        # Without a price they take no time, nor a place on the link.
        found = [] if table is None else [by_row(rank) for rank in range(schedule.ranks)]
        count = np.zeros(len(schedule) + 1, np.int64)
        for row, those in (pair for rows in found for pair in rows.items()):
            count[row + 1] = len(those)
        stages = [stage for rows in found for row in sorted(rows) for stage in rows[row]]
        seconds = np.zeros(schedule.stages, dtype) if table is None else table.astype(dtype)
        start = np.full(len(stages), -1, dtype)
        columns += [np.cumsum(count), np.array(stages, np.int64), seconds, start]
    apart = schedule.stages if schedule.placement.has_copies else 0
    # A store's link copies in both directions at once, as PCI Express does.
    link = np.array([apart, int(residency.sharding.stored)])
    return _Shards(*[*columns, np.zeros(2 * schedule.ranks, dtype), link])


def _pair_seconds(program: Program, costs: Costs) -> Table:
    """Return seconds of every fused pair, at the row of its forward; empty without pairs."""
    schedule = program.schedule
    first = np.flatnonzero(schedule.paired)
    if not len(first):
        return np.zeros(0, np.int64)
    forward = costs.seconds[schedule.stage[first], schedule.kind[first]]
    backward = costs.seconds[schedule.stage[first + 1], schedule.kind[first + 1]]
    spent = forward + backward if costs.pair is None else costs.pair[schedule.stage[first]]
    short = np.flatnonzero(spent < np.maximum(forward, backward))
    if len(short):
        row = first[short[0]]
        raise ConfigError(
            f"a pair takes at least as long as each of its halves: ({schedule.op(row)};{schedule.op(row + 1)}) has "
            f"{spent[short[0]]}, its halves {forward[short[0]]} and {backward[short[0]]}"
        )
    table = np.zeros(len(schedule), spent.dtype)
    table[first] = spent
    return table


def _run(rows: _Rows, seconds: _Seconds, rules: _Rules, times: _Times, shards: _Shards | None) -> None:
    offsets, source, target, rank, paired, stage, kind = rows
    op_seconds, pair_seconds, transfer, node = seconds
    early, sender_blocks, receiver_blocks = rules
    start, end, leave = times
    ranks, kinds = len(offsets) - 1, _KINDS
    position = [offsets[r] for r in range(ranks)]
    # A zero of the costs' type: numba allows a list one type, and whole times stay whole.
    zero = op_seconds[0] - op_seconds[0]
    clock = [zero for r in range(ranks)]
    if shards is not None:
        gathers, gathered, gather_seconds, gather_start = shards[:4]
        reductions, reduced, reduce_seconds, reduce_start, waits, link_of = shards[4:]
        apart, both_ways = link_of[0], link_of[1] > 0
        free = [
            zero for r in range(ranks)
        ]  # when the rank's link has no collective left, other than reductions both ways
        due = [zero for r in range(ranks)]  # end of its last reduction
        there = [
            zero for s in range(len(gather_seconds) + apart * (ranks - 1))
        ]  # end of a stage's last gather
    todo = [ranks - 1 - r for r in range(ranks)]
    while len(todo) > 0:
        r = todo.pop()
        row = position[r]
        now = clock[r]
        while row < offsets[r + 1]:
            width = 2 if paired[row] else 1

            # Receive: when the op can begin, and the backward of a pair if it may come later.
            begin = second = now
            blocked = zero
            ready = True
            for k in range(row, row + width):
                producer = source[k]
                if producer >= 0:
                    sent = leave[producer]
                    if sent < 0:
                        ready = False
                    elif rank[producer] != r:
                        # A boundary has two times, within a node and between nodes; its number is the lower stage.
                        link = 0 if node[rank[producer]] == node[r] else 1
                        travel = transfer[2 * min(stage[k], stage[producer]) + link]
                        if early and k > row:
                            second = max(second, sent + travel)
                        elif receiver_blocks:
                            begin = max(begin, sent) + travel
                            blocked += travel
                        else:
                            begin = max(begin, sent + travel)
            if not ready:
                break

            # Begin gathers, and wait for weights.
            if shards is not None:
                for n in range(gathers[row], gathers[row + width]):
                    gather_start[n] = max(now, free[r])
                    free[r] = there[apart * r + gathered[n]] = gather_start[n] + gather_seconds[gathered[n]]
                without = begin
                for k in range(row, row + width):
                    if kind[k] == _F:
                        begin = max(begin, there[apart * r + stage[k]])
                    elif kind[k] != _W:
                        begin = max(begin, there[apart * r + stage[k]] + blocked)
                waits[r] += begin - without

            # Compute.
            first_seconds = op_seconds[kinds * stage[row] + kind[row]]
            if width == 1:
                now = begin + first_seconds
            elif early:
                second_seconds = op_seconds[kinds * stage[row + 1] + kind[row + 1]]
                now = max(begin + pair_seconds[row], second + second_seconds)
            else:
                now = begin + pair_seconds[row]
            done = now

            # Send, and wake the receivers.
            for k in range(row, row + width):
                start[k] = begin
                end[k] = done
                if early and width == 2:
                    if k == row:
                        end[k] = begin + first_seconds
                    else:
                        start[k] = done - second_seconds
                leave[k] = now if sender_blocks else end[k]
                consumer = target[k]
                if consumer >= 0 and rank[consumer] != r:
                    receiver = rank[consumer]
                    if sender_blocks:
                        link = 0 if node[receiver] == node[r] else 1
                        now += transfer[2 * min(stage[k], stage[consumer]) + link]
                    # Wake the receiver only if it waits at the consumer (or at the consumer's pair).
                    gap = consumer - position[receiver]
                    if gap == 0 or gap == 1:
                        todo.append(receiver)
            # Wait for the reductions of the op before, and begin this one's; at the end, wait for all.
            if shards is not None:
                ends = row + width == offsets[r + 1]
                if not ends and due[r] > now:
                    waits[ranks + r] += due[r] - now
                    now = due[r]
                for n in range(reductions[row], reductions[row + width]):
                    reduce_start[n] = max(now, due[r] if both_ways else free[r])
                    due[r] = reduce_start[n] + reduce_seconds[reduced[n]]
                    if not both_ways:
                        free[r] = due[r]
                if ends:
                    waits[ranks + r] += max(zero, due[r] - now)
            row += width
            position[r] = row
        clock[r] = now
