"""List scheduling: every rank runs the op that matters most of those that are ready, and never runs out of memory.

Before a rank starts an op that takes memory (a forward, or an input half whose gradients wait for the weight half), it
checks that all microbatches in flight could still finish one after the other, the oldest first, in the memory that is left
(the banker's rule). So no order that this module builds is stuck or exceeds the limit, however small it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.schedule.jit import choose
from penstock.schedule.search.order_problem import UNLIMITED, CodeTables, Floats, Ints, OrderProblem


class _Ranks(NamedTuple):
    """Nodes of the ranks, for the kernel.

    Attributes:
        nodes: int64, nodes of each rank along the pipes, -1 for none, shape (ranks, most nodes).
        pipe, runs: int64, pipe and number of microbatches of every node, shape (nodes,).
        alone: int64, most memory that one microbatch takes on each rank, shape (ranks,).
    """

    nodes: Ints
    pipe: Ints
    runs: Ints
    alone: Ints
    split: bool


class _Progress(NamedTuple):
    """Progress of all ranks.

    Attributes:
        done: int64, ops run so far, shape (3 · nodes,).
        ends: float64, end of every op, infinite until it is scheduled, shape (3 · nodes, microbatches).
        held: int64, memory of each rank, shape (ranks,).
    """

    done: Ints
    ends: Floats
    held: Ints


@dataclass(frozen=True, eq=False)
class Rule:
    """Rule by which ranks decide.

    Attributes:
        turn: time at which each op is due, shape (3 · nodes, microbatches): of the ops that are ready the one with the
            smallest turn runs.
        patience: how long a rank waits for an op that is due before those that are ready, as a part of the time of the
            op that it could run.
        overrun: part of a W by which it may delay the op that the rank waits for.
    """

    turn: Floats
    patience: float
    overrun: float


class Dispatcher:
    """Builds orders of a problem.

    Args:
        orders: number of orders that will be built: compiling pays off for many.
    """

    def __init__(self, problem: OrderProblem, orders: int) -> None:
        self.problem, self._tables = problem, problem.tables
        nodes, pipe = len(problem.node_ranks), np.arange(len(problem.node_ranks)) // problem.stages
        held = problem.nodes_of
        padded = np.full((problem.ranks, max(map(len, held))), -1)
        for rank, own in enumerate(held):
            padded[rank, : len(own)] = own
        saved, after = self._tables.memory[0::4], self._tables.memory[1::4]
        alone = np.zeros(problem.ranks, np.int64)
        for q in range(len(problem.pipes)):
            for rank, own in enumerate(held):
                mine = own[pipe[own] == q]
                if len(mine):
                    alone[rank] = max(alone[rank], saved[mine].sum() + max(0, after[mine].max()))
        self._ranks = _Ranks(padded, pipe, problem.node_counts, alone, problem.backward == "split")
        self._shape = (3 * nodes, max(problem.counts))
        self._kernel = choose(_dispatch, orders * int(self._tables.offsets[-1]))

    def build(self, rule: Rule) -> tuple[float, Ints]:
        """Return the makespan of an order, infinite if it cannot be finished, and the order."""
        problem = self.problem
        progress = _Progress(
            np.zeros(self._shape[0], np.int64),
            np.full(self._shape, np.inf),
            np.zeros(problem.ranks, np.int64),
        )
        codes = np.zeros(int(self._tables.offsets[-1]), np.int64)
        length = self._kernel(
            self._tables, self._ranks, progress, rule.turn, float(rule.patience), float(rule.overrun), codes
        )
        return float(length), codes


def _dispatch(  # noqa: PLR0917 - numba takes no keyword-only parameters
    tables: CodeTables,
    own: _Ranks,
    progress: _Progress,
    turn: Floats,
    patience: float,
    overrun: float,
    codes: Ints,
) -> float:
    offsets, receiver, memory = tables.offsets, tables.receiver, tables.memory
    lag, seconds = tables.lag, tables.seconds
    nodes = own.nodes
    done, ends, held = progress
    ranks = len(nodes)
    free, wake = np.zeros(ranks), np.zeros(ranks)
    position = offsets[:ranks].copy()
    left, longest = len(codes), 0.0
    while left > 0:
        # Of ranks that choose at the same time the lowest comes first, so that the order is always the same.
        rank = 0
        for other in range(1, ranks):
            if wake[other] < wake[rank]:
                rank = other
        now = wake[rank]
        if now == np.inf:
            return np.inf
        chosen, until = _decide(tables, own, progress, turn, rank, now, patience, overrun)
        if chosen < 0:
            wake[rank] = until
            continue
        node, kind = chosen // 4, chosen % 4
        now += seconds[chosen]
        ends[3 * node + kind, done[3 * node + kind]] = now
        done[3 * node + kind] += 1
        held[rank] += memory[chosen]
        codes[position[rank]] = chosen
        position[rank] += 1
        free[rank] = wake[rank] = now
        longest = max(longest, now)
        left -= 1
        other = receiver[chosen]
        if other >= 0:
            # The code of the same op on the node after, or before for a gradient; its lag is the message's time.
            step = 4 if kind == 0 else -4
            arrival = max(now + lag[chosen + step], free[other])
            # A rank that waits for something later may choose again; a busy one will.
            if wake[other] > arrival:
                wake[other] = arrival
    return longest


def _decide(  # noqa: PLR0917 - numba takes no keyword-only parameters
    tables: CodeTables,
    own: _Ranks,
    progress: _Progress,
    turn: Floats,
    rank: int,
    now: float,
    patience: float,
    overrun: float,
) -> tuple[int, float]:
    """Return the code that a rank runs now, or -1 and the time at which it chooses again."""
    source, lag, seconds = tables.source, tables.lag, tables.seconds
    done, ends, _ = progress
    ready, weight, awaited = -1, -1, -1
    ready_turn, weight_turn, awaited_turn = np.inf, np.inf, np.inf
    arrival, first = np.inf, np.inf
    for node in own.nodes[rank]:
        if node < 0:
            break
        for kind in range(2):
            n = done[3 * node + kind]
            if n >= own.runs[node] or (kind == 1 and n >= done[3 * node]):
                continue
            code = 4 * node + kind
            there = ends[3 * node, n] if kind == 1 else 0.0
            if source[code] >= 0:
                there = ends[source[code], n] + lag[code]
            if there == np.inf:
                continue
            due = turn[3 * node + kind, n]
            if tables.memory[code] > 0 and not _is_safe(tables, own, progress, rank, code):
                continue
            if there <= now:
                if due < ready_turn:
                    ready, ready_turn = code, due
            else:
                first = min(first, there)
                if due < awaited_turn:
                    awaited, awaited_turn, arrival = code, due, there
        if own.split and done[3 * node + 2] < done[3 * node + 1]:
            due = turn[3 * node + 2, done[3 * node + 2]]
            if due < weight_turn or weight < 0:
                weight, weight_turn = 4 * node + 2, due
    best, best_turn = (weight, weight_turn) if weight_turn < ready_turn else (ready, ready_turn)
    if best >= 0 and (awaited < 0 or best_turn <= awaited_turn):
        return best, now
    # The op that is due first arrives later: a W may fill the gap, or another op if that would be a long wait.
    if weight >= 0 and (awaited < 0 or now + seconds[weight] <= arrival + overrun * seconds[weight]):
        return weight, now
    if ready >= 0 and arrival - now >= patience * seconds[ready]:
        return ready, now
    return -1, arrival if ready >= 0 else first


def _is_safe(tables: CodeTables, own: _Ranks, progress: _Progress, rank: int, code: int) -> bool:
    """Return whether all microbatches of a rank could finish one after the other if it ran a code now."""
    room = tables.limit[rank] - progress.held[rank] - tables.memory[code]
    if room < 0:
        return False
    if room >= own.alone[rank]:
        return True
    row = tables.row[code]
    progress.done[row] += 1
    safe = _can_finish(tables, own, progress, rank, room)
    progress.done[row] -= 1
    return safe


def _can_finish(tables: CodeTables, own: _Ranks, progress: _Progress, rank: int, room: int) -> bool:
    """Return whether all microbatches of a rank can finish one after the other, the oldest first."""
    memory, done = tables.memory, progress.done
    oldest, newest = UNLIMITED, 0
    for k in own.nodes[rank]:
        if k >= 0:
            oldest = min(oldest, done[3 * k + 1])
            newest = max(newest, done[3 * k])
            if own.split:  # a W waits for nothing but its I
                room -= (done[3 * k + 1] - done[3 * k + 2]) * memory[4 * k + 2]
    for n in range(oldest, newest):
        for pipe in range(own.pipe[-1] + 1):
            more = 0  # than is held now: all forwards that are left, then the backwards on the way back
            for k in own.nodes[rank]:
                if k >= 0 and own.pipe[k] == pipe and done[3 * k] <= n < own.runs[k]:
                    more += memory[4 * k]
            needed = more
            for k in own.nodes[rank, ::-1]:
                if k >= 0 and own.pipe[k] == pipe and done[3 * k + 1] <= n < own.runs[k]:
                    needed = max(needed, more + memory[4 * k + 1])
                    more -= memory[4 * k]
            if needed > room:
                return False
            room -= more
    return True
