"""The sweep that proves that a schedule does not deadlock.

Every rank runs its list strictly in order, and an op runs once the producer of its input has run. The sweep advances
every rank as far as possible until nothing moves. If every op ran, the levels of the ops (the step in which each runs
when every op takes one step) are an order that respects all waits. That order is the proof.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.schedule.jit import choose
from penstock.schedule.schedule import BoolColumn, IntColumn


def levels(
    offsets: npt.NDArray[np.int64],
    source: IntColumn,
    target: IntColumn,
    paired: BoolColumn,
    rank: IntColumn,
) -> IntColumn:
    """Return the unit-time step in which every op runs, from 1; 0 for ops that can never run."""
    arrays: tuple[Any, ...] = (offsets, source, target, paired, rank)
    kernel = choose(_levels, len(source))
    if kernel is _levels:
        level = [0] * len(source)
        kernel(*(array.tolist() for array in arrays), level)
        return np.array(level, np.int32)
    column = np.zeros(len(source), np.int32)
    kernel(*arrays, column)
    return column


def _levels(offsets: Any, source: Any, target: Any, paired: Any, rank: Any, level: Any) -> None:
    ranks = len(offsets) - 1
    position = [offsets[r] for r in range(ranks)]
    clock = [0 for r in range(ranks)]
    todo = [ranks - 1 - r for r in range(ranks)]
    while len(todo) > 0:
        r = todo.pop()
        end = offsets[r + 1]
        row = position[r]
        while row < end:
            width = 2 if paired[row] else 1
            step = clock[r]
            ready = True
            for k in range(row, row + width):
                producer = source[k]
                if producer >= 0:
                    if level[producer] == 0:
                        ready = False
                    else:
                        step = max(step, level[producer])
            if not ready:
                break
            clock[r] = step + 1
            for k in range(row, row + width):
                level[k] = step + 1
                if target[k] >= 0:
                    receiver = rank[target[k]]
                    # Wake the receiver only if it waits at the consumer (or at the consumer's pair).
                    gap = target[k] - position[receiver]
                    if receiver != r and (gap == 0 or gap == 1):
                        todo.append(receiver)
            row += width
            position[r] = row
