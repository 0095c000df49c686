from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.trace.join import align


def test_two_clocks_by_hand_and_what_is_no_barrier():
    # The second clock is 100 behind; in the second barrier both entered at 20 and left at 21.
    found = align([[[10, 13], [20, 21]], [[-89, -87], [-80, -79]]])
    assert found.offset.tolist() == [0, 100]
    assert found.error.tolist() == [0, 1]
    for met in ([], [[]], [[[1, 2, 3]]], [[[2, 1]]]):
        with pytest.raises(DataError, match="entered and later left every barrier"):
            align(met)


@given(
    offsets=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
    barriers=st.integers(1, 8),
)
def test_the_true_offset_is_within_the_error(offsets, seed, barriers):
    random = np.random.default_rng(seed)
    behind = np.array([0.0, *offsets])[:, None]
    entered = np.cumsum(random.random((len(behind), barriers)), axis=1)
    left = entered.max(axis=0) + random.random((len(behind), barriers))
    found = align(np.stack([entered - behind, left - behind], axis=2))
    assert (np.abs(found.offset - behind[:, 0]) <= found.error + 1e-9).all()


def test_more_barriers_never_make_the_error_larger():
    random = np.random.default_rng(0)
    entered = np.cumsum(random.random((3, 20)) + 1, axis=1)
    left = entered.max(axis=0) + random.random((3, 20)) * 0.5
    met = np.stack([entered, left], axis=2)
    errors = [align(met[:, :n]).error for n in range(1, 21)]
    assert all((b <= a).all() for a, b in pairwise(errors))


@given(seed=st.integers(0, 2**32 - 1), hosts=st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_processes_that_read_one_clock_have_one_offset_and_no_larger_error(seed, hosts):
    random = np.random.default_rng(seed)
    behind = random.uniform(-1e3, 1e3, 3)[hosts][:, None]
    behind -= behind[0]
    entered = np.cumsum(random.random((len(hosts), 5)), axis=1)
    left = entered.max(axis=0) + random.random((len(hosts), 5))
    met = np.stack([entered - behind, left - behind], axis=2)
    found, alone = align(met, hosts), align(met)
    assert (np.abs(found.offset - behind[:, 0]) <= found.error + 1e-9).all()
    assert (found.error <= alone.error + 1e-9).all()
    for process, host in enumerate(hosts):
        assert found.offset[process] == found.offset[hosts.index(host)]
        if host == hosts[0]:
            assert found.offset[process] == found.error[process] == 0
