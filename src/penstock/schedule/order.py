"""Can every op run, and how soon: the sweep behind the proof that a schedule does not deadlock.

Every rank runs its list strictly in order; an op runs once the op it takes from has run. The sweep advances every
rank as far as it can until nothing moves. If every op ran, the ops' levels (the step in which each runs
when every op takes one step) are an order that respects all waits, and that is the proof.
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
    """The unit-time step in which every op runs, from 1; 0 for ops that can never run."""
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
                waits_for = source[k]
                if waits_for >= 0:
                    if level[waits_for] == 0:
                        ready = False
                    else:
                        step = max(step, level[waits_for])
            if not ready:
                break
            clock[r] = step + 1
            for k in range(row, row + width):
                level[k] = step + 1
                if target[k] >= 0:
                    other = rank[target[k]]
                    # Wake the other rank only if it stands at the op that was waiting (or at its pair).
                    gap = target[k] - position[other]
                    if other != r and (gap == 0 or gap == 1):
                        todo.append(other)
            row += width
            position[r] = row
