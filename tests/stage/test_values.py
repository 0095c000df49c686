"""A batch is cut into microbatches, where they are wanted."""

from __future__ import annotations

import torch

from penstock.stage.values import slices


def test_every_microbatch_is_on_the_device_that_is_asked_for():
    x = {"ids": torch.arange(8).view(4, 2), "scale": 2.0}
    for part in slices(x, 2, "the input x", torch.device("meta"))[0]:
        assert part["ids"].is_meta
        assert part["ids"].shape == (2, 2)
        assert part["scale"] == 2.0


def test_without_a_device_the_microbatches_are_views_of_the_batch():
    x = torch.arange(8.0).view(4, 2)
    (first, second), rows = slices(x, 2, "the input x")
    assert rows == [2, 2]
    assert first.data_ptr() == x.data_ptr()
    assert torch.equal(second, x[2:])
