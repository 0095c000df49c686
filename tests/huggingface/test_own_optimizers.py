"""Single groups of parameters with an optimizer of their own beside the Trainer's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.base.errors import ConfigError
from penstock.huggingface.own_optimizers import read_own_optimizers, with_own_optimizers


def built(net: nn.Module, *groups: dict) -> torch.optim.Optimizer:
    own = torch.optim.AdamW(net.parameters(), lr=0.5)
    return with_own_optimizers(own, net, read_own_optimizers(groups))


def test_a_group_gets_its_own_optimizer_with_its_options():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    group = {"names": ["0.weight"], "optimizer": torch.optim.SGD, "lr": 0.25, "momentum": 0.5}
    theirs, own = built(net, group).param_groups
    assert [p is q for p, q in zip(theirs["params"], [*net.parameters()][1:], strict=True)] == [True] * 3
    assert theirs["lr"] == 0.5
    assert own["params"] == [net[0].weight]
    assert (own["lr"], own["momentum"]) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"names": ["0.weight"], "lr": 1.0}, "has no 'optimizer', a class of torch.optim"),
        ({"names": ["2.weight"], "optimizer": torch.optim.SGD}, "names '2.weight', which the model does not"),
        ({"names": ["1.bias"], "optimizer": torch.optim.SGD}, "takes no parameter that is trained"),
    ],
)
def test_a_group_that_cannot_have_one_is_refused(group, message):
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    net[1].bias.requires_grad_(False)
    with pytest.raises(ConfigError, match=message):
        built(net, group)
