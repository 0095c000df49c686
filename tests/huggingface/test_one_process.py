"""The state of an optimizer whose parameters are divided over processes, as one process has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.base.errors import ConfigError
from penstock.huggingface import one_process
from penstock.huggingface.one_process import FilledSampler, WholeOptimizer

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def groups_of(net: nn.Module, *groups: tuple[int, ...]) -> list[dict[str, Any]]:
    parameters = dict(net.named_parameters())
    return [{"params": [parameters[NAMES[n]] for n in group]} for group in groups]


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def met(monkeypatch: pytest.MonkeyPatch, *others: list[list[str]]) -> Any:
    """A pipeline of this process and others whose optimizers have groups of these names; their state is not gathered."""
    group = SimpleNamespace(each=lambda job: [job(), *others])
    monkeypatch.setattr(one_process, "RunGroup", SimpleNamespace(of=lambda pipe: group))
    monkeypatch.setattr(one_process, "gather_state", lambda entries, world, keep: entries)
    return SimpleNamespace(world=object())


def test_numbers_are_those_of_one_process_in_the_models_order(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
):
    own = torch.optim.SGD(groups_of(net, (3,), (2,)), lr=0.1, momentum=0.9)
    whole = WholeOptimizer(met(monkeypatch, [["0.bias"], ["0.weight"]]), net, own)
    for number, p in enumerate(net.parameters()):
        p.grad = torch.full_like(p, float(number))
    own.step()
    state = whole.state(keep=True)
    # Biases come first, which are the first group.
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2, 3]]
    assert {n: each["momentum_buffer"].unique().tolist() for n, each in state["state"].items()} == {
        1: [3.0],
        3: [2.0],
    }
    others = {0: {"momentum_buffer": torch.zeros(2)}, 2: {"momentum_buffer": torch.zeros(2, 2)}}
    again = torch.optim.SGD(groups_of(net, (3,), (2,)), lr=0.5, momentum=0.9)
    WholeOptimizer(met(monkeypatch, [["0.bias"], ["0.weight"]]), net, again)
    again.load_state_dict({**state, "state": state["state"] | others})
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.1]
    for p in own.state:
        assert torch.equal(again.state[p]["momentum_buffer"], own.state[p]["momentum_buffer"])
    # The state of this process alone is taken as it is.
    again.load_state_dict(own.state_dict())
    assert len(again.state) == 2


@pytest.mark.parametrize(
    ("rows", "batch", "seen"),
    [(4, 2, [0, 1, 2, 3]), (5, 4, [0, 1, 2, 3, 4, 0, 1, 2]), (1, 3, [0, 0, 0]), (0, 2, [])],
)
def test_the_last_batch_is_filled_with_the_first_rows(rows: int, batch: int, seen: list[int]):
    sampler = FilledSampler(range(rows), batch)
    assert list(sampler) == seen
    assert len(sampler) == len(seen)
    assert sampler.stop == rows  # what the sampler has


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([["0.bias"]], r"the optimizer has 1 and 2 parameter groups on the processes"),
        ([["0.bias"], [""]], r"the optimizer has parameters that are not the model's"),
    ],
)
def test_other_groups_on_another_process_are_refused(net, monkeypatch, other, message):
    optimizer = torch.optim.SGD(groups_of(net, (3,), (2,)), lr=0.1)
    with pytest.raises(ConfigError, match=message):
        WholeOptimizer(met(monkeypatch, other), net, optimizer)
