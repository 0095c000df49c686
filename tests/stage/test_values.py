"""A batch is split into microbatches on the requested device."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.base.errors import StageShapeError
from penstock.runtime.pipeline import Pipeline
from penstock.stage.microbatches import split_batch
from penstock.stage.values import pack


class Mode(IntEnum):
    FAST = 1


class Text(str):
    __slots__ = ()


def test_every_microbatch_is_on_the_device_that_is_asked_for():
    x = {"ids": torch.arange(8).view(4, 2), "scale": 2.0}
    for part in split_batch(x, 2, "the input x", torch.device("meta"))[0]:
        assert part["ids"].is_meta
        assert part["ids"].shape == (2, 2)
        assert part["scale"] == 2.0


def test_without_a_device_the_microbatches_are_views_of_the_batch():
    x = torch.arange(8.0).view(4, 2)
    (first, second), rows = split_batch(x, 2, "the input x")
    assert rows == [2, 2]
    assert first.data_ptr() == x.data_ptr()
    assert torch.equal(second, x[2:])


SUBCLASSES = [np.float64(0.5), Mode.FAST, Text("a"), np.str_("b")]


@pytest.mark.parametrize("value", SUBCLASSES)
def test_plain_values_of_subclasses_are_refused_where_they_travel(value: object):
    with pytest.raises(
        StageShapeError, match=rf"of the type \w[\w.]*{type(value).__name__} .* hand over \w+\(value\)"
    ):
        pack((torch.ones(1), value))
    assert pack((torch.ones(1), value), travels=False)[0].leaves[1] is value


class Scaled(nn.Linear):
    """Takes and returns a number beside its value."""

    def forward(self, value: Tensor | tuple[Tensor, np.float64]) -> tuple[Tensor, np.float64]:
        x, scale = value if isinstance(value, tuple) else (value, np.float64(0.5))
        return super().forward(x) * float(scale), scale


def test_they_may_go_from_layer_to_layer_of_one_stage_and_not_from_stage_to_stage():
    net = nn.Sequential(*[Scaled(4, 4) for _ in range(4)])
    x = torch.randn(4, 4)
    for recompute in ("none", "full"):
        for ranks in (1, 2):
            with Pipeline(
                net, lambda y, _: y[0].mean(), microbatches=2, ranks=ranks, recompute=recompute
            ) as pipe:
                if ranks == 1:
                    pipe.step(x, x)
                    continue
                with pytest.raises(StageShapeError, match=r"numpy\.float64 .* plain float"):
                    pipe.step(x, x)
                assert pipe.steps == 0
