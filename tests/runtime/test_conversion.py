"""A model that is converted between two steps goes on as plain PyTorch does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float32)


def converted(dtype: torch.dtype, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = plain.batch(step, 8)
    return x.to(dtype), y.to(dtype)


def gradients(rank: int, family: str) -> list[dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    found = []
    with Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=4, ranks=2, schedule=family) as pipe:
        for n, dtype in enumerate(DTYPES):
            for stage in pipe.stages.values():
                stage.module.to(dtype).zero_grad()
            pipe.step(*converted(dtype, n))
            found.append({name: p.grad.clone() for name, p in pipe.named_parameters()})
    return found


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "zb-v", "dualpipe-v"])
def test_gradients_follow_a_conversion_between_steps(processes: LocalProcesses, family):
    net, expected = plain.model(4), []
    for n, dtype in enumerate(DTYPES):
        net.to(dtype).zero_grad()
        plain.step(net, nn.functional.mse_loss, *converted(dtype, n), 4)
        expected.append({name: p.grad.clone() for name, p in net.named_parameters()})
    apart = processes.run(2, gradients, family)
    joined = [first | second for first, second in zip(*apart, strict=True)]
    for found in (gradients(0, family), joined):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for name, gradient in theirs.items():
                assert ours[name].dtype == gradient.dtype
                assert torch.equal(ours[name], gradient)


def test_the_bytes_held_follow_a_conversion_between_steps():
    net = plain.model(4)
    held = []
    with Pipeline(net, nn.functional.mse_loss, microbatches=4, ranks=2, schedule="zb-h1") as pipe:
        for n, dtype in enumerate((torch.float32, torch.float64)):
            net.to(dtype)
            pipe.step(*converted(dtype, n))
            held.append(pipe.trace().held.max())
    assert held[1] == 2 * held[0]


def test_a_weight_of_another_shape_is_trained_as_it_is():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12, bias=False)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    x, y = plain.batch(0, 8)
    with Pipeline(nets[0], nn.functional.mse_loss, microbatches=4, ranks=2, schedule="zb-h1") as pipe:
        pipe.step(x, y)
        for net in nets:
            net.zero_grad()
            net[1].weight.data = net[1].weight.data[:6].clone()
        pipe.step(x, y[:, :6])
    plain.step(nets[1], nn.functional.mse_loss, x, y[:, :6], 4)
    assert torch.equal(nets[0][1].weight.grad, nets[1][1].weight.grad)
