"""The order of a backward is known before it runs."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.parallel.data.gradient_order import parameter_order
from tests.support.replicas import WIDTH, batch, loss_of, model


def observed(net: nn.Module, loss: torch.Tensor) -> list[str]:
    names, hooks = [], []
    for name, p in net.named_parameters():
        hooks.append(p.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name)))
    loss.backward()
    for hook in hooks:
        hook.remove()
    return names


def predicted(net: nn.Module, loss: torch.Tensor) -> list[str]:
    names = {id(p): name for name, p in net.named_parameters()}
    return [names[id(leaf)] for leaf in parameter_order(loss) if id(leaf) in names]


def test_a_plain_stack_comes_backwards():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    assert predicted(net, net(torch.ones(1, 2)).sum()) == ["1.weight", "0.weight"]


class Random(nn.Module):
    """Uses parameters in random places of a random graph, some several times, some never."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        values = [x]
        for _ in range(12):
            a, b = self.random.choice(values), self.random.choice(values)
            values.append((a @ self.random.choice(self.weights)).tanh() + b)
        return values[-1] * values[-2]


@pytest.mark.parametrize("seed", range(25))
def test_the_order_is_the_one_the_engine_takes(seed):
    net = Random(seed)
    loss = net(torch.ones(2, WIDTH)).sum()
    assert predicted(net, loss) == observed(net, loss)


def test_norms_attention_and_residuals_come_in_the_engines_order():
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    loss = net(torch.ones(1, 3, 8)).square().sum()
    assert predicted(net, loss) == observed(net, loss)


def test_each_leaf_comes_once_and_frozen_ones_do_not():
    net = model()
    net[0][0].weight.requires_grad_(False)
    order = parameter_order(loss_of(net, *batch(0, 4)), loss_of(net, *batch(1, 4)))
    assert len(order) == len({id(p) for p in order}) == len(list(net.parameters())) - 1


def test_a_loss_without_a_graph_is_refused():
    with pytest.raises(PenstockError, match="no graph"):
        parameter_order(torch.ones(1))
    with pytest.raises(PenstockError, match="a leaf has no graph"):
        parameter_order(torch.ones(1, requires_grad=True))
