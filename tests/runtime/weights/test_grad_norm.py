"""The norm of all gradients: what counts, and over which processes each part of it is added up."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.runtime.weights import grad_norm
from penstock.runtime.weights.grad_norm import GlobalNorm


class Calls:
    """A world with one axis that only records its sums."""

    shards_matrices = False

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.axes = [self]

    def sum_norms(self, squares: dict[str, torch.Tensor], present: torch.Tensor, over_replicas: bool) -> None:
        assert set(squares) == {"tp", "ep"}
        self.seen.append(f"axis {over_replicas}")

    def __getattr__(self, name: str) -> Any:
        return lambda column: self.seen.append(name.removeprefix("all_reduce") or "_all")


def norm_of(
    gradients: list[torch.Tensor | None], counts: list[bool], world: Any = None, shards: Any = None
) -> Any:
    """A norm over parameters with these gradients, and the parameters."""
    parameters = [nn.Parameter(torch.zeros(2) if g is None else torch.zeros_like(g)) for g in gradients]
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    names = [str(n) for n in range(len(parameters))]
    local = SimpleNamespace(
        counted=lambda: zip(names, parameters, counts, strict=True),
        positions=lambda world: ({name: n for n, name in enumerate(names)}, len(names)),
    )
    return GlobalNorm(local, world).clip_(1.0, shards), parameters


def test_parameters_that_another_rank_counts_or_without_a_gradient_add_nothing():
    gradients = [torch.tensor([3.0, 0.0]), None, torch.tensor([12.0, 5.0]), torch.tensor([0.0, 4.0])]
    norm, parameters = norm_of(gradients, [True, True, False, True])
    assert norm.item() == 5.0
    # All are clipped, those that another rank counts as well.
    assert [p.grad.tolist() for p in parameters if p.grad is not None] == [
        pytest.approx([value / 5 for value in each]) for each in ([3.0, 0.0], [12.0, 5.0], [0.0, 4.0])
    ]


def test_gradients_of_several_dtypes_have_the_norm_of_torch():
    gradients = [torch.full((3,), 1.5), torch.full((2,), 0.7, dtype=torch.bfloat16)]
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(parameters, math.inf)
    assert torch.equal(norm_of(gradients, [True, True])[0], expected)


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
    world = Calls()
    world.shards_matrices = matrices
    parameters = SimpleNamespace(
        counted=lambda: [("p", nn.Parameter(torch.zeros(1)), True)], positions=lambda world: ({"p": 0}, 1)
    )
    (found,) = GlobalNorm(parameters, world).gradients(None)
    assert (found.tensor_parallel, found.expert) == where


@pytest.mark.parametrize(
    ("shards", "sums"),
    [
        (False, ["axis False", *["_all"] * 5]),
        (True, ["_dp", "_dp", "_dp", "axis True", *["_all"] * 5]),
    ],
)
def test_shards_are_added_over_replicas_where_the_update_is_divided_too(shards, sums):
    world = Calls()
    every = SimpleNamespace(find=lambda parameter: None) if shards else None
    norm, _ = norm_of([torch.tensor([3.0, 4.0])], [True], world, every)
    assert norm.item() == 5.0
    assert world.seen == sums
