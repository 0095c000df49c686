"""Dropout of `isolated_rng` on devices other than the CPU, where it keeps a mask of one byte an element."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from penstock.stage.rng.isolated_rng import isolated_rng
from penstock.stage.rng.random_functions import _Masked


def test_the_mask_of_one_byte_gives_the_product_and_its_gradients():
    x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.3
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        actual = _Masked.apply(x, mask, 2.5)
    assert torch.equal(actual, x * mask * 2.5)
    assert [t.dtype for t in saved] == [torch.bool]
    assert torch.autograd.gradcheck(lambda x: _Masked.apply(x, mask, 2.5), x)
    assert torch.autograd.gradgradcheck(lambda x: _Masked.apply(x, mask, 2.5), x)


def test_dropout_in_place_writes_into_its_input():
    x = torch.ones(1000)
    with isolated_rng(1, 2, 3, "blocks.0"):
        assert F.dropout(x, 0.5, inplace=True) is x
    assert set(x.tolist()) == {0.0, 2.0}
