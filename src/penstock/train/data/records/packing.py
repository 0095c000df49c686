"""Packing: records of many lengths, put together into rows of one length."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


def pack(lengths: Numbers, capacity: int) -> tuple[Numbers, Numbers]:
    """Put items into as few rows as the best-fit-decreasing rule finds.

    The longest item that is left goes into the fullest row that it fits into, at most 11/9 of the least number of rows and 4
    more (Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms", 1974).

    Args:
        lengths: length of each item, from 1 to `capacity`; shape (items,).
        capacity: length of a row.

    Returns:
        The items in the order of the rows, shape (items,), and the place in them where each row begins, with their number
        at the end, shape (rows + 1,).
    """
    rows_with: defaultdict[int, list[int]] = defaultdict(list)
    room = _Rooms()
    row_of = np.empty(len(lengths), np.int64)
    rows = 0
    longest_first = np.argsort(-lengths, kind="stable")
    for item, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        left = room.least_of_at_least(length)
        if left is None:
            row, left = rows, capacity
            rows += 1
        else:
            row = rows_with[left].pop()
            if not rows_with[left]:
                room.remove(left)
        row_of[item] = row
        if left > length:
            rows_with[left - length].append(row)
            room.add(left - length)
    order = np.argsort(row_of, kind="stable")
    begins = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row_of, minlength=rows), out=begins[1:])
    return order, begins


class _Rooms:
    """A set of small whole numbers, as the bits of one number; finds the least one above a bound."""

    def __init__(self) -> None:
        self._bits = 0

    def add(self, number: int) -> None:
        self._bits |= 1 << number

    def remove(self, number: int) -> None:
        self._bits &= ~(1 << number)

    def least_of_at_least(self, bound: int) -> int | None:
        above = self._bits >> bound
        return None if not above else bound + (above & -above).bit_length() - 1
