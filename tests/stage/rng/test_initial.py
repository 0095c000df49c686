from __future__ import annotations

import torch
from torch import nn

from penstock.stage.rng.initial import build_with_weights, generator_for


def normal(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    parameter.normal_(generator=generator)


def test_a_generator_depends_on_seed_and_name_only():
    def draw(seed: int, name: str) -> float:
        return torch.rand((), generator=generator_for(seed, name)).item()

    assert draw(0, "a") == draw(0, "a")
    assert len({draw(0, "a"), draw(1, "a"), draw(0, "b")}) == 3


def test_building_leaves_torchs_own_generator_alone():
    before = torch.get_rng_state()
    build_with_weights(lambda: nn.Linear(3, 4), "layer", 0, normal)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_parameter_is_filled_from_its_whole_name():
    one = build_with_weights(lambda: nn.Linear(3, 4), "one", 0, normal)
    again = build_with_weights(lambda: nn.Linear(3, 4), "one", 0, normal)
    two = build_with_weights(lambda: nn.Linear(3, 4), "two", 0, normal)
    assert torch.equal(one.weight, again.weight)
    assert not torch.equal(one.weight, two.weight)
    assert torch.equal(one.bias, torch.empty(4).normal_(generator=generator_for(0, "one.bias")))
    assert one.weight.requires_grad
