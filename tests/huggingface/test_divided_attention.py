"""Which arguments of a block are cut where its samples' tokens are divided."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.huggingface.divided_attention import ArgumentCutter
from penstock.parallel.context.attention import SequencePart

LENGTH = 8


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((LENGTH,), 0),  # positions
        ((2, LENGTH), 1),
        ((LENGTH, 4), 0),
        ((1, LENGTH, LENGTH), 1),  # rows of a mask, and not its keys
        ((2, 1, LENGTH, LENGTH), 2),
        ((2, LENGTH, 4), 1),
        ((2, 1, 1, LENGTH), None),
        ((LENGTH, 2, 3, 4), None),
        ((3,), None),
    ],
)
def test_the_dimension_of_the_tokens_is_cut(shape: tuple[int, ...], dim: int | None):
    part = SequencePart(1, 2)
    division = SimpleNamespace(part=part, asked=False)
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    cut = ArgumentCutter(division, LENGTH)({"a": [whole, whole], "b": "text"})
    assert cut["b"] == "text"
    assert cut["a"][0] is cut["a"][1]
    if dim is None:
        assert cut["a"][0] is whole
    else:
        assert torch.equal(cut["a"][0], part.cut(whole, dim))
    assert division.asked == (dim is not None)
