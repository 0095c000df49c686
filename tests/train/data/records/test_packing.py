from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.data.records.packing import pack


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200))
def test_every_item_is_in_one_row_and_no_row_is_overfull(lengths: list[int]):
    order, begins = pack(np.array(lengths), 40)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    rows = [order[a:b] for a, b in pairwise(begins.tolist())]
    sums = [sum(lengths[n] for n in row) for row in rows]
    assert all(0 < total <= 40 for total in sums)
    # No two rows could be one: the fuller half of what any-fit leaves open.
    assert sum(total <= 20 for total in sums) <= 1


def test_items_that_fill_rows_exactly_leave_no_room():
    order, begins = pack(np.array([3, 7, 5, 5, 4, 6]), 10)
    assert begins.tolist() == [0, 2, 4, 6]
    assert [sorted(order[a : a + 2].tolist()) for a in (0, 2, 4)] == [[0, 1], [4, 5], [2, 3]]
