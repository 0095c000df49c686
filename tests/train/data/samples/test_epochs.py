from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.data.samples.epochs import permute, shuffled


def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    first, second = (shuffled(np.arange(97) + 97 * epoch, 97, 3).tolist() for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(97))
    assert first != second
    assert shuffled(np.array([97, 3, 100]), 97, 3).tolist() == [second[0], first[3], second[3]]
    assert shuffled(np.arange(97), 97, 4).tolist() != first


@given(count=st.integers(1, 3000), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_an_order_is_a_permutation(count: int, seed: int, epoch: int):
    assert sorted(permute(np.arange(count), count, seed, epoch).tolist()) == list(range(count))


def test_an_order_is_well_mixed():
    order = permute(np.arange(4096), 4096, 0, 0)
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 0.06
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.06
