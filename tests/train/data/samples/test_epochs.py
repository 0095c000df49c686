from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.train.data.samples import permute


def test_every_epoch_and_seed_has_an_order_of_its_own():
    orders = [permute(np.arange(97), 97, *key).tolist() for key in ((3, 0), (3, 1), (4, 0))]
    assert len({tuple(order) for order in orders}) == 3
    assert permute(np.array([3, 0]), 97, 3, 1).tolist() == [orders[1][3], orders[1][0]]


@settings(max_examples=30)
@given(count=st.integers(1, 3000), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_an_order_is_a_permutation(count: int, seed: int, epoch: int):
    assert sorted(permute(np.arange(count), count, seed, epoch).tolist()) == list(range(count))


def test_an_order_is_well_mixed():
    order = permute(np.arange(4096), 4096, 0, 0)
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 0.06
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.06
