"""V-Half and V-Min: half and a third of 1F1B's activations, on a V, from one repeating pattern (2405.15362).

A microbatch passes a rank four times: forward going down and coming back, input gradient going down and coming back. The
paper gives the slot of each pass, one slot being one op, and microbatch j follows 6j slots later. From that order every
rank then runs what it can, slot by slot, weight halves where nothing else is ready: `_fill`.
"""

from __future__ import annotations

from typing import Any

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
    shift = 0 if p % 2 else 3
    rank = np.arange(p)
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
    shift = 0 if p % 3 else 2
    rank = np.arange(p)
    slots = (rank, 2 * p - 1 - rank, 2 * p + shift + rank, 4 * p + shift - 1 - rank)
    return _from_pattern("v-min", p, microbatches, slots, third_limit(p), fill_ahead=p % 3 == 0)


def half_limit(ranks: int) -> int:
    """Activations a rank holds at most under V-Half."""
    return ranks + 1 if ranks % 2 else ranks + 2


def third_limit(ranks: int) -> int:
    """Activations a rank holds at most under V-Min."""
    return 2 * ((ranks + 4) // 3)


def _from_pattern(
    name: str,
    ranks: int,
    microbatches: int,
    slots: tuple[npt.NDArray[np.int64], ...],
    most: int,
    *,
    fill_ahead: bool,
) -> Schedule:
    """Build the schedule.

    Args:
        slots: for every pass, in the order F of chunk 0 and 1, I of chunk 1 and 0, the slot on each rank.
        most: activations a rank may hold.
        fill_ahead: whether a rank whose next op is not ready runs a later one.
    """
    p, m = ranks, microbatches
    each = INTERVAL * np.arange(m)
    passes = np.repeat(np.array(_PASSES), m)
    orders = np.empty((p, 4 * m), np.int64)
    for r in range(p):
        orders[r] = passes[np.argsort(np.concatenate([slot[r] + each for slot in slots]), kind="stable")]
    codes = fill(orders, m, most, fill_ahead)
    columns = []
    for r in range(p):
        kind, chunk = np.divmod(codes[r], 2)
        stage = np.where(chunk == 0, r, 2 * p - 1 - r)
        columns.append(plain_columns(stage, _KINDS[kind], occurrence(codes[r])))
    return Schedule.from_columns(name, Placement.waves(p), m, columns)


# A pass as the kernel's number: 2·(F 0, I 1, W 2) + chunk.
_PASSES = (0, 1, 3, 2)
_KINDS = np.array([Kind.F, Kind.I, Kind.W], np.int8)


def fill(
    orders: npt.NDArray[np.int64], microbatches: int, most: int, fill_ahead: bool
) -> npt.NDArray[np.int64]:
    """Run every rank's order slot by slot, and put weight halves where nothing else is ready.

    Args:
        orders: passes, shape (ranks, 4·microbatches), numbers 2·kind + chunk with kind F 0, I 1.
        most: activations a rank may hold at once, freed at W.
        fill_ahead: a rank whose next pass is not ready runs the first later one that is, if all that it was to run
            before still fits in `most`.

    Returns:
        passes with the weight halves (kind 2), shape (ranks, 6·microbatches).
    """
    ranks = len(orders)
    # Where in its rank's order the n-th pass of each number stands.
    places = np.argsort(orders, axis=1, kind="stable").reshape(ranks, 4, microbatches)
    size = 6 * microbatches
    kernel = choose(_fill, ranks * size)
    if kernel is _fill:
        ran = [[0] * size for _ in range(ranks)]
        kernel(orders.tolist(), places.tolist(), microbatches, most, fill_ahead, ran)
        return np.array(ran, np.int64)
    table = np.zeros((ranks, size), np.int64)
    kernel(orders, places, microbatches, most, fill_ahead, table)
    return table


def _fill(orders: Any, places: Any, microbatches: int, most: int, fill_ahead: bool, ran: Any) -> None:
    ranks = len(orders)
    m = microbatches
    # end[pass][rank][n]: the slot after the n-th of these passes, -1 until it ran.
    end = [[[-1 for _ in range(m)] for _ in range(ranks)] for _ in range(4)]
    count = [[0 for _ in range(6)] for _ in range(ranks)]
    done = [[False for _ in range(4 * m)] for _ in range(ranks)]
    head = [0 for _ in range(ranks)]
    waiting = [[0 for _ in range(2 * m)] for _ in range(ranks)]
    left = ranks * 6 * m
    slot = 0
    while left > 0:
        for r in range(ranks):
            c = count[r]
            pending = c[2] + c[3] - c[4] - c[5]
            held = c[0] + c[1] - c[4] - c[5]
            while head[r] < 4 * m and done[r][head[r]]:
                head[r] += 1
            chosen = -1
            if head[r] < 4 * m:
                first = orders[r][head[r]]
                if first < 2 and held >= most and pending > 0:
                    chosen = 4
                best = 4 * m
                for number in range(4):
                    n = c[number]
                    if chosen == 4 or n == m:
                        continue
                    place = places[r][number][n]
                    if place >= best or (place > head[r] and not fill_ahead):
                        continue
                    chunk = number % 2
                    needs = -1
                    if number < 2:
                        if chunk == 0 and r == 0:
                            needs = 0
                        elif chunk == 0:
                            needs = end[0][r - 1][n]
                        elif r == ranks - 1:
                            needs = end[0][r][n]
                        else:
                            needs = end[1][r + 1][n]
                        room = held + 1
                        for k in range(head[r], place):
                            if not done[r][k]:
                                room += 1 if orders[r][k] < 2 else -1
                                if room > most:
                                    break
                        if room > most or held + 1 > most:
                            continue
                    elif end[chunk][r][n] >= 0:
                        if chunk == 1 and r == 0:
                            needs = end[1][r][n]
                        elif chunk == 1:
                            needs = end[3][r - 1][n]
                        elif r == ranks - 1:
                            needs = end[3][r][n]
                        else:
                            needs = end[2][r + 1][n]
                    if 0 <= needs <= slot:
                        chosen, best = number, place
            if chosen < 0 and pending > 0:
                chosen = 4
            if chosen < 0:
                continue
            if chosen == 4:
                chosen = 4 + waiting[r][c[4] + c[5]]
            else:
                done[r][places[r][chosen][c[chosen]]] = True
                end[chosen][r][c[chosen]] = slot + 1
                if chosen >= 2:
                    waiting[r][c[2] + c[3]] = chosen % 2
            ran[r][c[0] + c[1] + c[2] + c[3] + c[4] + c[5]] = chosen
            c[chosen] += 1
            left -= 1
        slot += 1
