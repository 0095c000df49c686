"""Into which file of a converted checkpoint a tensor goes."""

from __future__ import annotations

import pytest

from penstock.checkpoint.convert import _stage


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("model/embed.weight", 0),
        ("model/blocks.1.inner.weight", 1),
        ("model/blocks.10.inner.weight", 2),
        ("optimizer/exp_avg/blocks.1.inner.weight", 1),
        ("optimizer/exp_avg/blocks.10.bias", 2),
        ("optimizer/step", 0),
        ("main/blocks.1.inner.weight", 1),
        ("generators/1/cpu", 0),  # of no layer
    ],
)
def test_a_tensor_goes_to_the_file_of_its_layers_stage(name: str, stage: int):
    assert _stage(name, {"embed": 0, "blocks.1": 1, "blocks.10": 2}) == stage
