"""Options of groups around a step that is repeated: the step's own changes are undone, and the user's later ones stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock.runtime.flow.group_options import GroupOptions, copy_value, same_value


def made(**options: Any) -> tuple[torch.optim.Optimizer, GroupOptions, dict[str, Any]]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.5, momentum=0.9)
    optimizer.param_groups[0].update(options)
    return optimizer, GroupOptions(optimizer), optimizer.param_groups[0]


def test_a_later_change_of_the_user_stays_and_the_step_is_repeated_with_the_options_of_its_time():
    _, options, group = made(own=1)
    options.take()
    group["own"] = 2  # the step's
    assert options.step_ended()
    group["lr"], group["new"] = 0.1, "set"
    del group["nesterov"]
    later = options.take_back(repeats=True)
    assert (group["lr"], group["own"], "new" in group, "nesterov" in group) == (0.5, 1, False, True)
    group["own"] = 2  # the repeated step's
    options.give_back(later)
    assert (group["lr"], group["own"], group["new"], "nesterov" in group) == (0.1, 2, "set", False)


def test_a_step_that_is_left_out_leaves_only_the_users_change():
    _, options, group = made(own=1)
    options.take()
    group["own"] = 2
    options.step_ended()
    group["lr"] = 0.1
    options.give_back(options.take_back(repeats=True))
    assert (group["lr"], group["own"]) == (0.1, 1)


def test_nothing_is_changed_where_nothing_changed():
    _, options, group = made(lr=torch.tensor(0.5), betas=(0.9, 0.99), box={"t": torch.zeros(2)})
    before = {name: copy_value(value) for name, value in group.items() if name != "params"}
    rate = group["lr"]
    options.take()
    assert not options.step_ended()
    assert options.take_back(repeats=True) == []
    assert all(same_value(value, group[name]) for name, value in before.items())
    assert group["lr"] is rate


def test_a_learning_rate_that_is_a_tensor_is_written_in_place():
    _, options, group = made(lr=torch.tensor(0.5))
    rate = group["lr"]
    options.take()
    options.step_ended()
    rate.fill_(0.25)
    later = options.take_back(repeats=True)
    assert float(rate) == 0.5
    options.give_back(later)
    assert group["lr"] is rate
    assert float(rate) == 0.25


def test_a_tensor_within_an_option_is_copied():
    _, options, group = made(box={"t": [torch.zeros(2)]})
    options.take()
    group["box"]["t"][0] += 1
    assert options.step_ended()
    options.take_back(repeats=True)
    assert float(group["box"]["t"][0].sum()) == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, False),
        (float("nan"), float("nan"), True),
        ((1, [2]), (1, [2]), True),
        ({"a": 1}, {"b": 1}, False),
        (torch.zeros(2), torch.zeros(2), True),
        (torch.zeros(2), torch.zeros(1), False),
        (object(), object(), False),
    ],
)
def test_values_are_compared_by_type_and_content(one: object, other: object, same: bool):
    assert same_value(one, other) == same
    assert same_value(copy_value(one), one)
