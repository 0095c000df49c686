"""The one simulator: when every op of a Program runs, given what ops and messages cost.

Every rank runs its list strictly in order, and every op as soon as its rank is free and what it takes has arrived. Since
time never changes the order, one sweep over the ops finds all times: each op is touched once, and once more where it had to
wait for another rank's list to get further. There is no queue of events whose ties could fall one way or the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.jit import choose
from penstock.schedule.memory import Bytes, held
from penstock.schedule.ops import Kind
from penstock.schedule.program import Program
from penstock.simulate.costs import Costs, Table
from penstock.trace.events import Trace


def simulate(program: Program, costs: Costs, memory: Bytes | None = None) -> Trace:
    """Time every op of a program.

    The halves of a pair whose outputs leave early are events of their own, each as long as its op.

    Args:
        program: what runs, in which order, and who takes from whom.
        costs: what it costs. If all of it is whole numbers the times are int64 and exact, float64 otherwise.
        memory: what the trace shall say the ranks hold after every op, shape (ops,), as `schedule.memory.held` counts it; in
            chunks, freed at W, if not given.

    Raises:
        ScheduleError: the program deadlocks.
        ConfigError: the costs do not cover its stages, or a pair is shorter than one of its halves.
    """
    schedule = program.schedule
    costs.cover(schedule.stages)
    start, end = _times(program, costs)
    apart = costs.pair_output == "early" and bool(schedule.paired.any())
    stuck = np.flatnonzero(end < 0)
    if len(stuck):
        raise ScheduleError(
            f"{schedule.name} deadlocks: {schedule.op(stuck[0])} on rank {program.rank[stuck[0]]} never runs; "
            "`penstock schedule check` shows the cycle"
        )
    return Trace(
        schedule.ranks,
        program.rank,
        schedule.stage,
        schedule.kind,
        schedule.microbatch,
        start,
        end,
        np.zeros_like(schedule.paired) if apart else schedule.paired,
        held(schedule) if memory is None else memory,
        {
            "source": "simulated",
            "schedule": schedule.name,
            "stages": schedule.stages,
            "microbatches": schedule.microbatches,
            "held": "chunks" if memory is None else "bytes",
        },
    )


def _times(program: Program, costs: Costs) -> tuple[Table, Table]:
    """Start and end of every op; -1 for those that never run."""
    schedule, communication = program.schedule, costs.communication
    transfer = communication.transfer(schedule.stages)
    pair = _pair_seconds(program, costs)
    kind = np.result_type(costs.seconds, transfer, pair)
    tables = [np.ascontiguousarray(t, kind).ravel() for t in (costs.seconds, pair, transfer)]
    arrays: list[Any] = [
        schedule.offsets, program.source, program.target, program.rank, schedule.paired, schedule.stage,
        schedule.kind, communication.node(schedule.ranks), *tables,
    ]  # fmt: skip
    flags = (
        costs.pair_output == "early",
        communication.blocks in ("sender", "both"),
        communication.blocks in ("receiver", "both"),
    )
    # But for blocked senders an output leaves when its op ends, and one column serves for both.
    apart = flags[1]
    run = choose(_run, len(schedule))
    if run is _run:
        begin, finish = [-1] * len(schedule), [-1] * len(schedule)
        leave = list(finish) if apart else finish
        run(*(array.tolist() for array in arrays), *flags, begin, finish, leave)
        return np.array(begin, kind), np.array(finish, kind)
    start, end = np.empty(len(schedule), kind), np.full(len(schedule), -1, kind)
    run(*arrays, *flags, start, end, end.copy() if apart else end)
    return start, end


def _pair_seconds(program: Program, costs: Costs) -> Table:
    """Seconds of a fused pair by the row of its forward; empty without pairs."""
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


def _run(
    offsets: Any, source: Any, target: Any, rank: Any, paired: Any, stage: Any, kind: Any, node: Any,
    seconds: Any, pair: Any, transfer: Any,
    early: Any, sender_blocks: Any, receiver_blocks: Any,
    start: Any, end: Any, leave: Any,
) -> None:  # fmt: skip
    """Fill in `start`, `end` and `leave`, when the op's output is handed over (its transfer begins)."""
    ranks = len(offsets) - 1
    kinds = 5
    position = [offsets[r] for r in range(ranks)]
    clock = [seconds[0] - seconds[0] for r in range(ranks)]
    todo = [ranks - 1 - r for r in range(ranks)]
    while len(todo) > 0:
        r = todo.pop()
        row = position[r]
        now = clock[r]
        while row < offsets[r + 1]:
            width = 2 if paired[row] else 1
            begin = now
            second = now
            ready = True
            for k in range(row, row + width):
                giver = source[k]
                if giver >= 0:
                    there = leave[giver]
                    if there < 0:
                        ready = False
                    elif rank[giver] != r:
                        far = 0 if node[rank[giver]] == node[r] else 1
                        travel = transfer[2 * min(stage[k], stage[giver]) + far]
                        if early and k > row:
                            second = max(second, there + travel)
                        elif receiver_blocks:
                            begin = max(begin, there) + travel
                        else:
                            begin = max(begin, there + travel)
            if not ready:
                break
            one = seconds[kinds * stage[row] + kind[row]]
            if width == 1:
                now = begin + one
            elif early:
                two = seconds[kinds * stage[row + 1] + kind[row + 1]]
                now = max(begin + pair[row], second + two)
            else:
                now = begin + pair[row]
            done = now
            for k in range(row, row + width):
                start[k] = begin
                end[k] = done
                if early and width == 2:
                    if k == row:
                        end[k] = begin + one
                    else:
                        start[k] = done - two
                leave[k] = now if sender_blocks else end[k]
                taker = target[k]
                if taker >= 0 and rank[taker] != r:
                    other = rank[taker]
                    if sender_blocks:
                        far = 0 if node[other] == node[r] else 1
                        now += transfer[2 * min(stage[k], stage[taker]) + far]
                    # Wake the other rank only if it stands at the op that was waiting (or at its pair).
                    gap = taker - position[other]
                    if gap == 0 or gap == 1:
                        todo.append(other)
            row += width
            position[r] = row
        clock[r] = now


assert len(Kind) == 5, "the kernel's `kinds`, a number there because numba compiles it"
