"""Learning rates and other options that the user sets between flowing steps give the weights of steps that end together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import NonFiniteError
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.groups import run_cases

RANKS, STEPS = 2, 7


class Decaying(torch.optim.SGD):
    """SGD whose step makes its own learning rate smaller, and counts in its options."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 0.9
            group.setdefault("box", {"t": torch.zeros(())})["t"] += 1
        super().step()


def set_options(how: str, optimizer: torch.optim.Optimizer, n: int) -> None:
    for group in optimizer.param_groups:
        if how == "by hand":
            group["lr"] = 0.1 / (n + 2)
        elif how == "weight decay":
            group["weight_decay"] = 0.1 * (n + 1)
        elif how == "momentum of the next step":
            group["momentum"] = 0.9 if n % 2 else 0.5
        elif how == "over the scheduler's" and n in (2, 3):
            group["lr"] = 0.01


def train(rank: int, how: str, flow: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    net = plain.model(8)
    factor = 1.0
    next(net[0].parameters()).register_hook(lambda grad: grad * factor)  # which only the first rank sees
    make: Any = Decaying if how == "the step's own" else torch.optim.SGD
    options = {"lr_factor": lambda n: 1 / (n + 1)} if how == "over the scheduler's" else {}
    with Pipeline(
        net, nn.functional.mse_loss, microbatches=4, schedule="zb-v", ranks=RANKS, timeout=60
    ) as pipe:
        updates = PipelineOptimizer(pipe, make, lr=0.1, momentum=0.9, clip=30.0, flow=flow, **options)
        own = updates.optimizers[rank]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(own, 0.7) if how == "own scheduler" else None
        for n in range(STEPS):
            factor = {2: 1e5, 4: math.nan}.get(n, 1.0)  # clipped, and skipped
            try:
                result = pipe.step(*plain.batch(n, 8))
                updates.step()
            except NonFiniteError:  # without flow
                pipe.steps += 1
                updates.zero_grad()
            if scheduler is not None:
                scheduler.step()
            set_options(how, own, n)
        float(result.loss)
        pipe.wait()
        weights = {name: value.clone() for name, value in pipe.state_dict().items()}
        undone = 0 if pipe.flow is None else pipe.flow.undone
        group = {name: value for name, value in own.param_groups[0].items() if name != "params"}
        return {"weights": weights, "options": group, "undone": undone, "steps": updates.steps}


WAYS = ["by hand", "own scheduler", "weight decay", "momentum of the next step"]
WAYS += ["over the scheduler's", "the step's own"]
FEW = ["own scheduler", "the step's own"]


@pytest.mark.parametrize("ways", [FEW, pytest.param(WAYS, marks=pytest.mark.slow)], ids=["few", "all"])
def test_options_set_between_steps_count_as_without_flow(processes: LocalProcesses, ways: list[str]):
    cases = [(how, flow) for how in ways for flow in (False, True)]
    found = run_cases(processes, RANKS, train, cases)
    undone = 0
    for n, how in enumerate(ways):
        for barrier, flowing in zip(found[2 * n], found[2 * n + 1], strict=True):
            undone += flowing.pop("undone")
            barrier.pop("undone")
            assert barrier["options"] == flowing["options"], how
            assert barrier["steps"] == flowing["steps"], how
            for name, value in barrier["weights"].items():
                assert torch.equal(value, flowing["weights"][name]), (how, name)
    assert undone  # else nothing was shown


class Momentum(torch.optim.Optimizer):
    """SGD with momentum that it keeps outside its state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.moments: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.moments.setdefault(id(p), torch.zeros_like(p))
                p.sub_(moment.mul_(0.9).add_(p.grad), alpha=group["lr"])


def keep_moments_outside(rank: int) -> str:
    torch.set_num_threads(1)
    with Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=4, ranks=RANKS) as pipe:
        updates = PipelineOptimizer(pipe, Momentum, lr=0.1, flow=True)
        pipe.step(*plain.batch(0, 8))
        with pytest.raises(ValueError, match="flow=False") as caught:
            updates.step()
        return str(caught.value)


def test_state_outside_the_optimizers_state_is_refused_on_every_rank(processes: LocalProcesses):
    for text in processes.run(RANKS, keep_moments_outside):
        assert "Momentum changes its attribute 'moments'" in text
