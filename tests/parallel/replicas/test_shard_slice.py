"""Slices of a parameter: the state of an optimizer is cut into them and joined from them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from penstock.parallel.replicas.shard_slice import ShardSlice, join_shards

PARAMETER = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    "parameter", [PARAMETER, PARAMETER.t(), torch.tensor(2.0)], ids=["rows", "columns", "number"]
)
@pytest.mark.parametrize("cuts", [(0, 12), (0, 5, 12), (-3, 1, 2, 20)])
def test_state_of_each_element_is_divided_and_joined_and_that_of_the_parameter_stays(
    parameter: torch.Tensor, cuts: tuple[int, ...]
):
    """Also where its memory is laid out otherwise, and where a replica has no element."""
    whole: dict[str, Any] = {
        "exp_avg": parameter + 100, "laid out otherwise": (parameter + 200).contiguous(), "step": torch.tensor(3.0),
        "eta": torch.tensor(1.0), "row": torch.ones(3), "flag": True,
    }  # fmt: skip
    shards = []
    for begin, end in pairwise(cuts):
        shard = ShardSlice.between(parameter, begin, end)
        shards.append((shard, {key: shard.of(v) if shard.covers(key, v) else v for key, v in whole.items()}))
    assert sum(shard.count for shard, _ in shards) == parameter.numel()
    for shard, state in shards:
        of_each = [key for key, value in state.items() if value is not whole[key]]
        assert of_each == ["exp_avg", "laid out otherwise"]
        assert all(state[key].shape == (shard.count,) for key in of_each)
    joined = join_shards(shards)
    assert joined.keys() == whole.keys()
    for key, value in whole.items():
        assert torch.equal(torch.as_tensor(joined[key]), torch.as_tensor(value)), key


def test_a_replica_that_has_all_keeps_the_shape():
    shard = ShardSlice.between(PARAMETER, -5, 20, whole=True)
    assert (shard.first, shard.count) == (0, 12)
    assert torch.equal(shard.of(PARAMETER), PARAMETER)
