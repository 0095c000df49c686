"""Values and losses that layers pass to the stage they run in."""

from __future__ import annotations

import pytest
import torch

import penstock
from penstock.base.errors import PenstockError
from penstock.stage.named import Context, within


def test_losses_of_one_name_are_summed():
    with within(Context({}, {})) as context:
        for size in (1.0, 2.0):
            penstock.add_loss(torch.tensor(size), "balance")
        penstock.add_loss(torch.tensor(8.0))
    assert context.losses == {"balance": torch.tensor(3.0), "auxiliary": torch.tensor(8.0)}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1.0, "float"),
        (torch.ones(2), r"torch\.float32 of shape \(2,\)"),
        (torch.tensor(1), r"torch\.int64 of shape \(\)"),
    ],
)
def test_a_loss_is_a_scalar_tensor_with_a_fraction(value, kind):
    with within(Context({}, {})) as context:
        with pytest.raises(PenstockError, match=f"scalar floating-point tensor, got {kind}; take its mean"):
            penstock.add_loss(value)
        assert context.losses == {}
