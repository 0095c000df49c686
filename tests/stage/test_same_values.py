"""Two tensors have the same values: bit for bit, or up to the rounding of sums in another order."""

from __future__ import annotations

import pytest
import torch

from penstock.stage.same_values import same_values

ONE = torch.randn(1000, generator=torch.Generator().manual_seed(0))


def test_last_bits_count_only_where_values_must_be_exact():
    near, far = torch.nextafter(ONE, ONE + 1), ONE.clone()
    far[3] += 1e-2
    assert not same_values(near, ONE)  # kernels of a CPU give the same bits each time
    assert not same_values(near, ONE, exact=True)
    assert same_values(near, ONE, exact=False)
    for other in (far, -ONE, torch.zeros(1000), torch.full((1000,), torch.nan)):
        assert not same_values(other, ONE, exact=False)
        assert not same_values(ONE, other, exact=False)


@pytest.mark.parametrize("exact", [None, True])
def test_not_a_number_is_the_same_as_itself(exact: bool | None):
    odd = ONE.clone()
    odd[5] = torch.nan
    assert same_values(odd, odd.clone(), exact)
    assert not same_values(odd, ONE, exact)


@pytest.mark.parametrize("other", [ONE.double(), ONE.view(10, 100), ONE[:1]])
def test_another_dtype_or_shape_is_another_value(other: torch.Tensor):
    assert not same_values(ONE, other, exact=False)
