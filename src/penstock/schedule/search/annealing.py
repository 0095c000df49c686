"""Simulated annealing of an order: one op at a time moves a few places, mostly on the critical path.

An order is timed with every op as early as possible; its length is the makespan. An order may exceed the memory for a
while, at a price, because the way from one tight order to a better one often leads through a larger one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.schedule.jit import choose
from penstock.schedule.search.order_problem import CodeTables, Floats, Ints, numbers

ALWAYS = 10**9
"""Ops that one call times: always enough to compile the kernels."""


class Heat(NamedTuple):
    """Parameters of one run.

    Attributes:
        start, end: temperatures, in seconds.
        price: seconds that a rank's op costs for each unit of memory that is too much: 0.4 of it at the start,
            twice of it at the end.
        distance: largest number of places that an op moves.
        target: makespan at which the run ends.
    """

    moves: int
    start: float
    end: float
    price: float
    distance: int
    seed: int
    target: float


class _State(NamedTuple):
    """An order with its times.

    Attributes:
        codes, rank, number: code, rank and microbatch of every op, shape (ops,).
        place: place of every op, shape (3 · nodes, microbatches).
        begin, end: times of every op, shape (ops,).
        held: memory that its rank holds after every op, shape (ops,).
        random: state of the random numbers, shape (1,).
        path: room for the places of a critical path, shape (ops,).
        work: seconds of all ops of each rank, shape (ranks,).
        position, clock, left_work, todo: room for each rank's next place, time, work left, and turn, shape (ranks,).
    """

    codes: Ints
    rank: Ints
    number: Ints
    place: Ints
    begin: Floats
    end: Floats
    held: Ints
    random: Ints
    path: Ints
    work: Floats
    position: Ints
    clock: Floats
    left_work: Floats
    todo: Ints


def anneal(tables: CodeTables, codes: Ints, microbatches: int, heat: Heat) -> tuple[float, Ints]:
    """Return the best order that fits the memory, with its makespan; infinite if none of the run's orders does.

    Args:
        microbatches: largest number of microbatches of a pipe.
    """
    state = _state(tables, codes, microbatches, heat.seed)
    best = codes.copy()
    return choose(_anneal, ALWAYS)(tables, state, heat, best), best


def time_order(tables: CodeTables, codes: Ints, microbatches: int) -> tuple[float, Floats, Floats]:
    """Return the makespan of an order, infinite if it deadlocks, and begin and end of every op."""
    state = _state(tables, codes, microbatches, 0)
    return float(choose(_sweep, ALWAYS)(tables, state, np.inf)), state.begin, state.end


def _state(tables: CodeTables, codes: Ints, microbatches: int, seed: int) -> _State:
    ops, rank = len(codes), np.repeat(np.arange(len(tables.limit)), np.diff(tables.offsets))
    held = np.zeros(ops, np.int64)
    number, place = np.zeros(ops, np.int64), np.zeros((3 * len(tables.row) // 4, microbatches), np.int64)
    for a, b in zip(tables.offsets[:-1], tables.offsets[1:], strict=True):
        own = codes[a:b]
        held[a:b] = np.cumsum(tables.memory[own])
        number[a:b] = numbers(own)
    place[tables.row[codes], number] = np.arange(ops)
    random = np.array([(seed * 7919 + 12345) & 0x7FFFFFFF])
    ranks = len(tables.limit)
    work = np.zeros(ranks)
    np.add.at(work, rank, tables.seconds[codes])
    of_ops = (codes.copy(), rank, number, place, np.zeros(ops), np.zeros(ops), held, random)
    of_ranks = (np.zeros(ranks, np.int64), np.zeros(ranks), np.zeros(ranks), np.zeros(ranks, np.int64))
    return _State(*of_ops, np.zeros(ops, np.int64), work, *of_ranks)


def _sweep(tables: CodeTables, state: _State, allowed: float) -> float:
    """Time every op as early as possible; return the makespan, infinite if the ranks deadlock or it exceeds `allowed`."""
    offsets, source, receiver = tables.offsets, tables.source, tables.receiver
    lag, seconds, tail = tables.lag, tables.seconds, tables.tail
    codes, number, place, begin, end = state.codes, state.number, state.place, state.begin, state.end
    position, clock, left_work, todo = state.position, state.clock, state.left_work, state.todo
    ranks, left, longest = len(position), len(codes), 0.0
    for rank in range(ranks):
        position[rank], clock[rank], todo[rank] = offsets[rank], 0.0, ranks - 1 - rank
        left_work[rank] = state.work[rank]
    for at in range(left):
        end[at] = -1.0
    size = ranks
    while size > 0:
        size -= 1
        rank = todo[size]
        at, now, stop = position[rank], clock[rank], offsets[rank + 1]
        left_here = left_work[rank]
        while at < stop:
            code = codes[at]
            if source[code] >= 0:
                arrival = end[place[source[code], number[at]]]
                if arrival < 0.0:
                    break
                now = max(now, arrival + lag[code])
            begin[at] = now
            now += seconds[code]
            left_here -= seconds[code]
            if now + max(tail[code], left_here) > allowed:
                return np.inf
            end[at] = now
            other = receiver[code]
            if other >= 0:
                # Each rank is at most once in the list.
                listed = False
                for k in range(size):
                    listed = listed or todo[k] == other
                if not listed:
                    todo[size] = other
                    size += 1
            at += 1
            left -= 1
        position[rank], clock[rank], left_work[rank] = at, now, left_here
        longest = max(longest, now)
    return longest if left == 0 else np.inf


def _anneal(tables: CodeTables, state: _State, heat: Heat, best: Ints) -> float:
    codes, rank, held, random, path = state.codes, state.rank, state.held, state.random, state.path
    limit = tables.limit
    length = _sweep(tables, state, np.inf)
    excess = 0
    for at in range(len(codes)):
        excess += max(0, held[at] - limit[rank[at]])
    least = length if excess == 0 else np.inf
    size = 0
    cooling = (heat.end / heat.start) ** (1.0 / heat.moves)
    temperature = heat.start
    for move in range(heat.moves):
        if least <= heat.target:
            break
        temperature *= cooling
        if size == 0:
            size = _critical_path(tables, state, length)
        # Only moves on the critical path can shorten the order; one in eight is of any op, which may make room for them.
        at = path[_draw(random, size)] if _draw(random, 8) > 0 else _draw(random, len(codes))
        distance = 1 + _draw(random, heat.distance) if _draw(random, 4) == 0 else 1
        while distance < heat.distance and _draw(random, 2) == 0:
            distance += 1
        to = at + distance if _draw(random, 2) == 0 else at - distance
        if to < tables.offsets[rank[at]] or to >= tables.offsets[rank[at] + 1] or not _free(state, at, to):
            continue
        _shift(tables, state, at, to)
        change = _excess(tables, state, min(at, to), max(at, to), False)
        # The makespan up to which the move is accepted: then an order that will exceed it need not be timed to its end.
        allowed = length - heat.price * (0.4 + 1.6 * move / heat.moves) * change
        # The Metropolis rule, solved for the makespan; the 1 keeps the logarithm finite.
        allowed -= temperature * np.log((_draw(random, 1048576) + 1.0) / 1048577.0)
        changed = _sweep(tables, state, allowed * (1.0 + 1e-12))
        # Rounding must not reject an order that is as long as before.
        if changed <= allowed * (1.0 + 1e-12):
            length, size = changed, 0
            excess += change
            _excess(tables, state, min(at, to), max(at, to), True)
            if excess == 0 and length < least:
                least = length
                for k in range(len(codes)):
                    best[k] = codes[k]
        else:
            _shift(tables, state, to, at)
    return least


def _draw(random: Ints, below: int) -> int:
    """Return a random whole number of at least 0 and less than `below`."""
    # The constants of C's rand: the same numbers compiled and as plain Python.
    random[0] = (int(random[0]) * 1103515245 + 12345) & 0x7FFFFFFFFFFF
    return int(random[0] >> 16) % below


def _critical_path(tables: CodeTables, state: _State, length: float) -> int:
    """Write the places of a random critical path to the state; return how many they are."""
    offsets, source, lag = tables.offsets, tables.source, tables.lag
    codes, rank, number, place = state.codes, state.rank, state.number, state.place
    begin, end, random, path = state.begin, state.end, state.random, state.path
    tiny = 1e-9 * length
    size, at = 0, -1
    for other in range(1, len(offsets)):
        stop = offsets[other]
        if end[stop - 1] >= length - tiny and (at < 0 or _draw(random, 2) == 0):
            at = stop - 1
    while at >= 0:
        path[size] = at
        size += 1
        code, before, sent = codes[at], -1, -1
        if at > offsets[rank[at]] and end[at - 1] >= begin[at] - tiny:
            before = at - 1
        if source[code] >= 0:
            sent = place[source[code], number[at]]
            if end[sent] + lag[code] < begin[at] - tiny:
                sent = -1
        at = sent if before < 0 or (sent >= 0 and _draw(random, 2) == 0) else before
    return size


def _free(state: _State, at: int, to: int) -> bool:
    """Return whether an op may pass all ops up to the place `to` of its rank."""
    codes, number = state.codes, state.number
    step = 1 if to > at else -1
    node, kind = codes[at] // 4, codes[at] % 4
    for other in range(at + step, to + step, step):
        # Not an op of its own microbatch or row; W and B of a node keep the order of their gradients.
        if codes[other] // 4 == node and (
            number[other] == number[at] or codes[other] % 4 == kind or codes[other] % 4 + kind >= 4
        ):
            return False
    return True


def _shift(tables: CodeTables, state: _State, at: int, to: int) -> None:
    """Move an op to another place of its rank."""
    codes, number, place = state.codes, state.number, state.place
    step = 1 if to > at else -1
    code, microbatch = codes[at], number[at]
    for k in range(at, to, step):
        codes[k], number[k] = codes[k + step], number[k + step]
        place[tables.row[codes[k]], number[k]] = k
    codes[to], number[to] = code, microbatch
    place[tables.row[code], microbatch] = to


def _excess(tables: CodeTables, state: _State, first: int, last: int, note: bool) -> int:
    """Return by how much more the memory is exceeded after the ops of a rank in a range; note what is held if asked."""
    codes, rank, held = state.codes, state.rank, state.held
    limit = tables.limit[rank[first]]
    now = held[first - 1] if first > tables.offsets[rank[first]] else 0
    change = 0
    for at in range(first, last + 1):
        now += tables.memory[codes[at]]
        change += max(0, now - limit) - max(0, held[at] - limit)
        if note:
            held[at] = now
    return change
