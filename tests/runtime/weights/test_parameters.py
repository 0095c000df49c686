"""The state of a pipeline: what a process gives of it, it takes again, tied weights included."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.groups import run_cases

WIDTH, M = 6, 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
    net[3][0].weight = net[0][0].weight
    return net


def reloaded(rank: int, schedule: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Changes all weights in the process's own state, and loads it; then the same under the tied weight's second name."""
    x, y = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)).chunk(2)
    found = []
    with Pipeline(model(), F.mse_loss, microbatches=M, schedule=schedule, ranks=2) as pipe:
        pipe.load_state_dict(pipe.state_dict())
        pipe.step(x, y)
        state = {name: value * 0.5 for name, value in pipe.state_dict().items()}
        pipe.load_state_dict(state)
        found.append(pipe.step(x, y).loss)
        state["3.0.weight"] = state.pop("0.0.weight") * 2
        pipe.load_state_dict(state)
        found.append(pipe.step(x, y).loss)
        return {name: value.clone() for name, value in pipe.state_dict().items()}, found


def test_a_processes_own_state_loads_again_with_a_weight_tied_over_processes(processes: LocalProcesses):
    net = model()
    x, y = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)).chunk(2)
    losses = []
    for factor in (1.0, 2.0):
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.5 if factor == 1.0 else 1.0)
            net[0][0].weight.mul_(factor)
        losses.append(
            torch.stack([F.mse_loss(net(a), b) for a, b in zip(x.chunk(M), y.chunk(M), strict=True)]).mean()
        )
    cases = [("1f1b",), ("dualpipe",)]
    for case, parts in zip(cases, run_cases(processes, 2, reloaded, cases), strict=True):
        whole, told = reloaded(0, *case)
        assert {**parts[0][0], **parts[1][0]}.keys() == whole.keys()
        for state, found in [(whole, told), *parts]:
            assert "3.0.weight" not in state
            assert torch.equal(state["0.0.weight"], net[0][0].weight)
            for name, value in state.items():
                assert torch.equal(value, net.state_dict()[name])
            torch.testing.assert_close(torch.stack(found), torch.stack(losses))
