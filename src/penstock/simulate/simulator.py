"""The simulator: start and end of every op of a Program, given the costs of ops and messages.

Every rank runs its list strictly in order, and every op as soon as its rank is free and its input has arrived. Time never
changes the order, so one sweep over the ops yields all times: each op is touched once, and once more if it had to wait for
another rank. There is no queue of events, and so there are no ties to break.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.base.errors import ConfigError, ScheduleError
from penstock.schedule.jit import choose
from penstock.schedule.memory import Bytes, held
from penstock.schedule.ops import Kind
from penstock.schedule.program import Program
from penstock.simulate.costs import Costs, Table
from penstock.trace.events import Trace

_KINDS = len(Kind)


def simulate(program: Program, costs: Costs, memory: Bytes | None = None) -> Trace:
    """Time every op of a program.

    The halves of a pair whose outputs leave early are events of their own, each as long as its op. If all costs are
    whole numbers, the times are int64 and exact; float64 otherwise. `memory`, as from `schedule.memory.held`, is what
    the trace says of each op's rank after the op; without it the trace counts chunks, freed at W.
    """
    schedule = program.schedule
    costs.require_sums(schedule.stages, schedule.ranks, schedule.microbatches)
    start, end = _times(program, costs)
    split_pairs = costs.pair_output == "early" and bool(schedule.paired.any())
    stuck = np.flatnonzero(end < 0)
    if len(stuck):
        raise ScheduleError(
            f"{schedule.name} deadlocks: {schedule.op(stuck[0])} on rank {program.rank[stuck[0]]} never runs; "
            "`penstock schedule check` shows the cycle"
        )
    return Trace(
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


class _Times(NamedTuple):
    """Results by row, -1 for ops that never run; `leave` is when the op's output is sent (its transfer begins)."""

    start: Any
    end: Any
    leave: Any


def _times(program: Program, costs: Costs) -> tuple[Table, Table]:
    """Return start and end of every op; -1 for an op that never runs."""
    schedule, communication = program.schedule, costs.communication
    transfer = communication.transfer(schedule.stages)
    pair = _pair_seconds(program, costs)
    dtype = np.result_type(costs.seconds, transfer, pair)
    rows = _Rows(
        schedule.offsets, program.source, program.target, program.rank, schedule.paired, schedule.stage,
        schedule.kind,
    )  # fmt: skip
    tables = (costs.seconds, pair, transfer)
    flat = [np.ascontiguousarray(table, dtype).ravel() for table in tables]
    seconds = _Seconds(flat[0], flat[1], flat[2], communication.node(schedule.ranks))
    rules = _Rules(
        costs.pair_output == "early",
        communication.blocks in ("sender", "both"),
        communication.blocks in ("receiver", "both"),
    )
    start, end = (np.full(len(schedule), -1, dtype) for _ in range(2))
    # Unless senders block, an output leaves when its op ends, and one column serves for both.
    kernel = choose(_run, len(schedule))
    if kernel is _run:
        rows, seconds = _Rows(*(c.tolist() for c in rows)), _Seconds(*(c.tolist() for c in seconds))
        begin, finish = start.tolist(), end.tolist()
        kernel(rows, seconds, rules, _Times(begin, finish, list(finish) if rules.sender_blocks else finish))
        return np.array(begin, dtype), np.array(finish, dtype)
    kernel(rows, seconds, rules, _Times(start, end, end.copy() if rules.sender_blocks else end))
    return start, end


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


def _run(rows: _Rows, seconds: _Seconds, rules: _Rules, times: _Times) -> None:
    offsets, source, target, rank, paired, stage, kind = rows
    op_seconds, pair_seconds, transfer, node = seconds
    early, sender_blocks, receiver_blocks = rules
    start, end, leave = times
    ranks, kinds = len(offsets) - 1, _KINDS
    position = [offsets[r] for r in range(ranks)]
    # A zero of the costs' type: numba allows a list one type, and whole times stay whole.
    clock = [op_seconds[0] - op_seconds[0] for r in range(ranks)]
    todo = [ranks - 1 - r for r in range(ranks)]
    while len(todo) > 0:
        r = todo.pop()
        row = position[r]
        now = clock[r]
        while row < offsets[r + 1]:
            width = 2 if paired[row] else 1

            # Receive: when the op can begin, and the backward of a pair if it may come later.
            begin = second = now
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
                        else:
                            begin = max(begin, sent + travel)
            if not ready:
                break

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
            row += width
            position[r] = row
        clock[r] = now
