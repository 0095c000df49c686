"""The norm of all gradients: over which processes each part of it is added up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.runtime.weights import grad_norm
from penstock.runtime.weights.grad_norm import GlobalNorm


@pytest.mark.parametrize(
    ("divided", "local", "matrices", "where"),
    [
        (False, False, True, (False, False)),
        (True, False, True, (True, False)),
        (True, True, True, (False, True)),
        (True, False, False, (False, False)),  # the caller's own code divided it
    ],
)
def test_a_part_of_a_matrix_is_added_over_those_that_share_it(divided, local, matrices, where, monkeypatch):
    monkeypatch.setattr(grad_norm, "is_sharded", lambda parameter: divided)
    monkeypatch.setattr(grad_norm, "has_local_uses", lambda parameter: local)
    world = SimpleNamespace(shards_matrices=matrices)
    parameters = SimpleNamespace(
        counted=lambda: [("p", nn.Parameter(torch.zeros(1)), True)], positions=lambda world: ({"p": 0}, 1)
    )
    (found,) = GlobalNorm(parameters, world).gradients(None)
    assert (found.tensor_parallel, found.expert) == where
