"""A model that is changed after its split is refused in the next step: its layers would not follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import penstock
from penstock.base.errors import SplitError
from tests.support import own_models


def replaced_head(net: nn.Module) -> None:
    net.head = nn.Linear(own_models.WIDTH, own_models.VOCABULARY)


def added_block(net: nn.Module) -> None:
    net.blocks.append(own_models.Block())


def replaced_block(net: nn.Module) -> None:
    net.blocks[1] = own_models.Block()


def other_way(net: nn.Module) -> None:
    net.checkpoint = True


def added_hook(net: nn.Module) -> None:
    net.register_forward_pre_hook(lambda module, inputs: None)


CHANGES: list[tuple[Callable[[nn.Module], None], str]] = [
    (replaced_head, "head"),
    (added_block, r"blocks\.4"),
    (replaced_block, r"blocks\.1"),
    (other_way, "checkpoint"),
    (added_hook, "a hook"),
]


@pytest.mark.parametrize(("change", "name"), CHANGES, ids=lambda v: getattr(v, "__name__", None))
def test_a_change_is_refused_by_name(change: Callable[[nn.Module], None], name: str):
    net = own_models.made(own_models.Switch)
    x, y = own_models.batch()
    with penstock.Pipeline(net, lambda output, _: output.square().mean(), ranks=2, microbatches=2) as pipe:
        pipe.step(x, y)
        change(net)
        with pytest.raises(SplitError, match=f"^{name} of the model"):
            pipe.step(x, y)


def test_values_may_change():
    net = own_models.made(own_models.Masked)
    x, y = own_models.batch()
    with penstock.Pipeline(net, lambda output, _: output.square().mean(), ranks=2, microbatches=2) as pipe:
        before = pipe.step(x, y).loss
        with torch.no_grad():
            net.slope.mul_(2)
            net.head.weight.mul_(2)
        assert not torch.equal(pipe.step(x, y).loss, before)
        net.eval()
        net.train()
        pipe.step(x, y)
