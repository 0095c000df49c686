"""16-bit weights are trained through fp32 copies, with gradients kept in fp32."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from penstock.runtime.optim.main_weights import MainWeights, keep_gradients_in_float32
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.lanes import exhaustive

STEPS, MICROBATCHES = 3, 4


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def model() -> nn.Sequential:
    return plain.model(8).bfloat16()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = plain.batch(step, 2 * MICROBATCHES)
    return x.bfloat16(), y.bfloat16()


@cache
def unsplit() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    """With torch alone: gradients summed in fp32, an optimizer over fp32 copies, rounding after each step."""
    net = model()
    for p in net.parameters():
        p.grad_dtype = torch.float32
    mains = [nn.Parameter(p.detach().float()) for p in net.parameters()]
    optimizer = torch.optim.AdamW(mains, lr=1e-3)
    norms = []
    for n in range(STEPS):
        plain.step(net, loss_fn, *batch(n), MICROBATCHES)
        for main, p in zip(mains, net.parameters(), strict=True):
            assert p.grad.dtype == torch.float32
            main.grad, p.grad = p.grad, None
        norms.append(nn.utils.clip_grad_norm_(mains, 0.1))
        optimizer.step()
        with torch.no_grad():
            for main, p in zip(mains, net.parameters(), strict=True):
                p.copy_(main)
    named = dict(net.named_parameters())
    return (
        {n: p.detach() for n, p in named.items()},
        {n: main.detach() for n, main in zip(named, mains, strict=True)},
        norms,
    )


def pipelined(rank: int, ranks: int, family: str):
    torch.set_num_threads(1)
    with Pipeline(model(), loss_fn, microbatches=MICROBATCHES, ranks=ranks, schedule=family) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-3, clip=0.1, main_weights=True)
        norms = []
        for n in range(STEPS):
            pipe.step(*batch(n))
            assert {p.grad.dtype for p in pipe.parameters()} == {torch.float32}
            norms.append(optimizer.step().grad_norm)
        return (
            {n: p.detach() for n, p in pipe.named_parameters()},
            optimizer.state_dict()["main_weights"],
            norms,
        )


def assert_same(parts: list) -> None:
    weights, mains, norms = unsplit()
    seen: tuple[dict, dict] = ({}, {})
    for part_weights, part_mains, part_norms in parts:
        assert part_norms == norms
        seen[0].update(part_weights)
        seen[1].update(part_mains)
    for ours, theirs in zip(seen, (weights, mains), strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name].dtype == theirs[name].dtype
            assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize(("ranks", "family"), [(2, "zb-v"), *exhaustive((1, "gpipe"), (4, "zb-h1"))])
def test_threads_train_bfloat16_as_torch_does_by_hand(ranks, family):
    assert_same([pipelined(0, ranks, family)])


def test_processes_train_bfloat16_as_torch_does_by_hand(processes: LocalProcesses):
    assert_same(processes.run(2, pipelined, 2, "1f1b"))


@pytest.mark.parametrize("in_processes", [False, *exhaustive(True)])
def test_copies_of_a_stage_keep_their_gradients_in_float32(processes: LocalProcesses, in_processes):
    parts = processes.run(2, pipelined, 2, "chimera") if in_processes else [pipelined(0, 2, "chimera")]
    _, mains, _ = unsplit()
    for ours, our_mains, _ in parts:
        for name, value in our_mains.items():
            assert torch.allclose(value, mains[name], atol=1e-5)
            assert torch.equal(ours[name], value.bfloat16())


def test_updates_too_small_for_bfloat16_are_not_lost():
    net = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).bfloat16())
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(1.0)
    found = {}
    for main_weights in (False, True):
        with Pipeline(net, loss_fn, microbatches=1, ranks=2) as pipe:
            optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=1e-3, main_weights=main_weights)
            for _ in range(8):
                pipe.step(torch.ones(1, 4).bfloat16(), torch.zeros(1, 4).bfloat16())
                for p in pipe.parameters():
                    p.grad.fill_(1.0)
                optimizer.step()
        found[main_weights] = {float(p.detach().flatten()[0]) for p in net.parameters()}
    assert found == {False: {1.0}, True: {0.9921875}}  # 1 - 8 / 1000 in bfloat16


def test_parameters_in_fp32_are_their_own_main_weights():
    with Pipeline(plain.model(4), loss_fn, microbatches=2, ranks=2) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, main_weights=True)
        assert optimizer.state_dict()["main_weights"] == {}
        own = {id(p) for o in optimizer.optimizers.values() for p in o.param_groups[0]["params"]}
        assert own == {id(p) for p in pipe.parameters()}


def test_weights_loaded_behind_the_optimizers_back_are_the_truth_and_those_it_rounded_are_not():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    keep_gradients_in_float32([p])
    main = MainWeights([("p", p)], True)
    with torch.no_grad():
        main.by_name["p"].fill_(1.001)
    main.round_into_parameters()
    assert p.tolist() == [1.0] * 3
    with torch.no_grad():
        p.copy_(torch.ones(3))
    main.lend_gradients()
    assert main.by_name["p"].tolist() == pytest.approx([1.001] * 3)
    with torch.no_grad():
        p.copy_(torch.full((3,), 2.0))
    main.lend_gradients()
    assert main.by_name["p"].tolist() == [2.0] * 3


def test_gradients_that_are_there_already_are_cast():
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    p.grad = torch.full((2,), 0.5, dtype=torch.bfloat16)
    frozen = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    keep_gradients_in_float32([p, frozen])
    assert p.grad.dtype == torch.float32
    assert p.grad.tolist() == [0.5, 0.5]
    assert frozen.grad_dtype == torch.bfloat16
