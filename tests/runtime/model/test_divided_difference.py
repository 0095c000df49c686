"""The difference that another order of sums explains, where context parallelism compares a layer with whole samples."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.parallel.context.samples import _differ


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ([1.0, math.nan, 2.0], False),
        ([1.0, math.nan, 2.0 + 1e-5], False),
        ([1.0, math.nan, 2.01], True),
        ([1.0, 0.0, 2.0], True),
        ([math.nan, math.nan, 2.0], True),
    ],
)
def test_values_that_are_not_numbers_hide_no_difference(other: list[float], differs: bool):
    assert _differ(torch.tensor([1.0, math.nan, 2.0]), torch.tensor(other)) == differs


def test_layers_that_give_zeros_do_not_differ():
    zeros = torch.zeros(2, 4)
    assert not _differ(zeros, zeros.clone())
    assert _differ(zeros, torch.full((2, 4), 1e-30))
