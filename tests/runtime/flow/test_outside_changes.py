"""An optimizer whose step changes what could not be undone is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.runtime.flow.outside_changes import OutsideChanges

BUILT_IN: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.1)}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
]


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2))]
    made[0].grad = torch.ones(4, 3)  # the other one has none
    return made


@pytest.mark.parametrize(("make", "options"), BUILT_IN)
def test_the_optimizers_of_torch_change_nothing_else(make: Any, options: dict[str, Any]):
    optimizer = make(weights(), **{"lr": 0.1, **options})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    outside = OutsideChanges(optimizer)
    for _ in range(3):
        outside.check(optimizer.step)
        scheduler.step()


class Own(torch.optim.SGD):
    """SGD that does something more in its step."""

    def __init__(self, params: Any, more: Callable[[Any], object], **options: Any) -> None:
        super().__init__(params, **options)
        self.more = more
        self.moments: dict[str, torch.Tensor] = {"m": torch.zeros(3)}
        self.own_random, self.own_torch = random.Random(0), torch.Generator()
        self.own_numpy = np.random.default_rng(0)
        self.inner = nn.Linear(2, 2)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            super().step()
            self.more(self)


HABITS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a counter": (lambda o: setattr(o, "t", getattr(o, "t", 0) + 1), "its attribute 't'"),
    "a moment": (lambda o: o.moments["m"].add_(1), "moments"),
    "a moment through .data": (lambda o: o.moments["m"].data.add_(1), "moments"),
    "a new moment": (lambda o: o.moments.setdefault("n", torch.zeros(1)), "moments"),
    "state of all": (lambda o: o.state["all"].update(t=o.state["all"].get("t", 0) + 1), "state['all']"),
    "a module": (lambda o: o.inner.weight.mul_(2), "inner"),
    "a weight without a gradient": (
        lambda o: o.param_groups[0]["params"][1].mul_(2),
        "parameter 0 without a gradient",
    ),
    "torch's numbers": (lambda o: torch.rand(1), "random numbers"),
    "Python's numbers": (lambda o: random.random(), "random numbers"),
    "NumPy's numbers": (lambda o: np.random.rand(), "random numbers"),
    "own torch numbers": (lambda o: torch.rand(1, generator=o.own_torch), "own_torch"),
    "own Python numbers": (lambda o: o.own_random.random(), "own_random"),
    "own NumPy numbers": (lambda o: o.own_numpy.random(), "own_numpy"),
}


@pytest.mark.parametrize("habit", HABITS)
def test_other_changes_are_refused_by_name_in_the_first_step(habit: str):
    more, name = HABITS[habit]
    optimizer = Own(weights(), more, lr=0.1)
    with pytest.raises(ConfigError, match="Own") as caught:
        OutsideChanges(optimizer).check(optimizer.step)
    assert name in str(caught.value)
    assert "flow=False" in str(caught.value)


@pytest.mark.parametrize("habit", [name for name in HABITS if ".data" not in name])
def test_changes_that_begin_later_are_refused_when_they_begin(habit: str):
    more, _ = HABITS[habit]
    late = iter([False, False, True])
    optimizer = Own(weights(), lambda o: more(o) if next(late) else None, lr=0.1)
    outside = OutsideChanges(optimizer)
    outside.check(optimizer.step)
    outside.check(optimizer.step)
    with pytest.raises(ConfigError, match="Own"):
        outside.check(optimizer.step)


def test_hooks_on_the_step_are_refused():
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="SGD has hooks on its step"):
        OutsideChanges(optimizer).check(optimizer.step)
