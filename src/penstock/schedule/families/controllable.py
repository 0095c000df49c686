"""V-Half and V-Min: half and a third of 1F1B's activations, on a V, from one repeating pattern (2405.15362).

A microbatch passes a rank four times: forward going down and coming back, input gradient going down and coming back. The
paper gives the slot of each pass, one slot being one op, and microbatch j follows 6j slots later. `_fill` then runs every
rank's passes in that order, slot by slot, with weight halves where no pass is ready.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.schedule.families.phases import occurrence
from penstock.schedule.jit import choose
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule, plain_columns

INTERVAL = 6
"""Slots between two microbatches: three ops on each of a rank's two chunks."""


def v_half(ranks: int, microbatches: int) -> Schedule:
    """V-Half (2405.15362): at most p+2 activations of half a stage's size a rank (p+1 if p is odd), half of 1F1B's.

    Rank r holds stages r and 2p-1-r. With F = B = W the bubble is 6p-3k-1 ops from m = 2p on, with k the activations
    held: the least that any order can reach in that memory.

    ::

        2 ranks, 3 microbatches
        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 3F2 3I2 0I1 3W2 0I2 0W1 0W2
        rank 1  1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    p = ranks
    # With an even p, 3p is a multiple of the interval, and the second and fourth pass would share a slot.
    shift = 0 if p % 2 else 3
    rank = np.arange(p)
    # The paper's stable pattern (its table 9): F down 2 slots a rank and up 1, I likewise.
    slots = (2 * rank, 3 * p - 2 - rank, 3 * p + shift - 1 + 2 * rank, 6 * p + shift - 2 - rank)
    return _from_pattern("v-half", p, microbatches, slots, half_limit(p), fill_ahead=True)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """V-Min (2405.15362): at most 2⌊(p+4)/3⌋ activations of half a stage's size a rank, a third of 1F1B's.

    Rank r holds stages r and 2p-1-r. With F = B = W the bubble is 6p-3k-1 ops from m = 2p on, with k the activations
    held, and 4 more when p mod 3 = 2; with unequal times it grows with m. Where 3 divides p the pattern would put two
    ops in one slot and has a gap instead, so there ranks run ahead into it.

    ::

        2 ranks, 3 microbatches
        rank 0  0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
        rank 1  1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2
    """
    p = ranks
    # If 3 divides p, 2p is a multiple of the interval, and the first and third pass would share a slot.
    shift = 0 if p % 3 else 2
    rank = np.arange(p)
    # The paper's stable pattern (its table 8): all passes go down and up 1 slot a rank.
    slots = (rank, 2 * p - 1 - rank, 2 * p + shift + rank, 4 * p + shift - 1 - rank)
    return _from_pattern("v-min", p, microbatches, slots, third_limit(p), fill_ahead=p % 3 == 0)


def half_limit(ranks: int) -> int:
    """Return the largest number of activations that a rank holds under V-Half."""
    return ranks + 1 if ranks % 2 else ranks + 2


def third_limit(ranks: int) -> int:
    """Return the largest number of activations that a rank holds under V-Min."""
    return 2 * ((ranks + 4) // 3)


def _from_pattern(
    name: str,
    ranks: int,
    microbatches: int,
    slots: tuple[npt.NDArray[np.int64], ...],
    max_held: int,
    *,
    fill_ahead: bool,
) -> Schedule:
    """Build a schedule from slots of the first microbatch: F of chunk 0, F of chunk 1, I of chunk 1, I of chunk 0."""
    p, m = ranks, microbatches
    each = INTERVAL * np.arange(m)
    passes = np.repeat(np.array(_PASSES), m)
    orders = np.empty((p, 4 * m), np.int64)
    for r in range(p):
        orders[r] = passes[np.argsort(np.concatenate([slot[r] + each for slot in slots]), kind="stable")]
    codes = fill(orders, m, max_held, fill_ahead)
    columns = []
    for r in range(p):
        kind, chunk = np.divmod(codes[r], 2)
        stage = np.where(chunk == 0, r, 2 * p - 1 - r)
        columns.append(plain_columns(stage, _KINDS[kind], occurrence(codes[r])))
    return Schedule.from_columns(name, Placement.waves(p), m, columns)


# Passes as the kernel's numbers: 2·(F 0, I 1, W 2) + chunk.
_PASSES = (0, 1, 3, 2)
_KINDS = np.array([Kind.F, Kind.I, Kind.W], np.int8)


def fill(
    orders: npt.NDArray[np.int64], microbatches: int, max_held: int, fill_ahead: bool
) -> npt.NDArray[np.int64]:
    """Run every rank's passes slot by slot, with weight halves where no pass is ready.

    Args:
        orders: passes in order, shape (ranks, 4·microbatches), as 2·kind + chunk with kind 0 for F, 1 for I.
        max_held: largest number of activations a rank may hold at once, freed at W.
        fill_ahead: whether a rank whose next pass is not ready runs the first later one that is, provided that all
            passes before it still fit in `max_held`.

    Returns:
        Passes with the weight halves (kind 2), shape (ranks, 6·microbatches).
    """
    ranks = len(orders)
    places = np.argsort(orders, axis=1, kind="stable").reshape(ranks, 4, microbatches)
    tables = _Tables(
        orders,
        places,
        _sources(ranks),
        end=np.full((4 * ranks, microbatches), -1),
        done=np.zeros((ranks, 4 * microbatches), np.bool_),
        chunks=np.zeros((ranks, 2 * microbatches), np.int64),
        count=np.zeros((ranks, 6), np.int64),
        head=np.zeros(ranks, np.int64),
        filled=np.zeros((ranks, 6 * microbatches), np.int64),
    )
    kernel = choose(_fill, tables.filled.size)
    if kernel is _fill:
        tables = _Tables(*(table.tolist() for table in tables))
    kernel(tables, max_held, fill_ahead)
    return np.asarray(tables.filled, np.int64)


def _sources(ranks: int) -> npt.NDArray[np.int64]:
    """The pass that yields each pass's input, as number·ranks + rank; -1 for none, shape (ranks, 4)."""
    rank = np.arange(ranks)
    first, last = rank == 0, rank == ranks - 1
    return np.stack(
        [
            np.where(first, -1, rank - 1),
            np.where(last, rank, ranks + rank + 1),
            np.where(last, 3 * ranks + rank, 2 * ranks + rank + 1),
            np.where(first, ranks + rank, 3 * ranks + rank - 1),
        ],
        axis=1,
    )


class _Tables(NamedTuple):
    """Tables of the kernel: arrays where it is compiled, lists otherwise."""

    orders: Any  # passes of every rank as 2·kind + chunk, shape (ranks, 4·microbatches)
    places: Any  # place in its rank's order of the n-th pass of each number, shape (ranks, 4, microbatches)
    # Row of `end` with the pass that yields each pass's input, -1 for none, shape (ranks, 4).
    sources: Any
    end: Any  # row number·ranks + rank: the slot after the n-th of these passes, -1 until it ran
    done: Any  # of the passes in `orders`
    chunks: Any  # chunk of every weight half, in the order in which the input gradients ran
    count: Any  # passes run so far by number, shape (ranks, 6)
    head: Any  # place of the first pass of the order that has not run
    filled: Any


def _fill(tables: _Tables, max_held: int, fill_ahead: bool) -> None:
    orders, places, sources, end, done, chunks, count, head, filled = tables
    ranks, size = len(orders), len(orders[0])
    left = ranks * len(filled[0])
    slot = 0
    while left > 0:
        for r in range(ranks):
            c = count[r]
            while head[r] < size and done[r][head[r]]:
                head[r] += 1
            pending = c[2] + c[3] - c[4] - c[5]
            held = c[0] + c[1] - c[4] - c[5]
            full = held >= max_held
            chosen = -1
            # A full rank whose next pass is a forward first frees memory by a weight half.
            if head[r] < size and not (pending > 0 and full and orders[r][head[r]] < 2):
                last = size - 1 if fill_ahead else head[r]
                chosen = _next_pass(
                    r, slot, sources[r], orders[r], places[r], c, end, done[r], head[r], last, max_held - held
                )
            if chosen >= 0:
                n = c[chosen]
                done[r][places[r][chosen][n]] = True
                end[chosen * ranks + r][n] = slot + 1
                if chosen >= 2:
                    chunks[r][c[2] + c[3]] = chosen % 2
            elif pending > 0:
                chosen = 4 + chunks[r][c[4] + c[5]]
            else:
                continue
            filled[r][c[0] + c[1] + c[2] + c[3] + c[4] + c[5]] = chosen
            c[chosen] += 1
            left -= 1
        slot += 1


def _next_pass(  # noqa: PLR0917 - numba takes no keyword-only parameters
    rank: int,
    slot: int,
    sources: Any,
    order: Any,
    places: Any,
    count: Any,
    end: Any,
    done: Any,
    head: int,
    last: int,
    room: int,
) -> int:
    """Return the first pass of a rank's order, at most at place `last`, that is ready and fits; -1 if none does."""
    chosen = -1
    for number in range(4):
        n = count[number]
        if n == len(places[number]) or places[number][n] > last:
            continue
        if sources[number] >= 0 and not 0 <= end[sources[number]][n] <= slot:
            continue
        if number < 2:
            ready = _fits(order, done, head, places[number][n], room)
        else:
            ready = end[number % 2 * (len(end) // 4) + rank][n] >= 0
        if ready:
            chosen = number
            last = places[number][n] - 1
    return chosen


def _fits(order: Any, done: Any, head: int, place: int, room: int) -> bool:
    """Return whether a forward fits together with every pass that the order has before it."""
    needed = 1
    if needed > room:
        return False
    for k in range(head, place):
        if not done[k]:
            needed += 1 if order[k] < 2 else -1
            if needed > room:
                return False
    return True
