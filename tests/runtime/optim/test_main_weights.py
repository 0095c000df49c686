"""16-bit weights are trained through fp32 copies, with gradients kept in fp32; float16 with a scale, too."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.main_weights import MainWeights, keep_gradients_in_float32
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.lanes import exhaustive, slow

STEPS, MICROBATCHES = 14, 4
SCALE = {"init_scale": 2.0**24, "growth_interval": 2}
"""Too high at first, for float16."""


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def batch(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = plain.batch(step, 2 * MICROBATCHES)
    return x.to(dtype), y.to(dtype)


@pytest.mark.parametrize("counted", [True, False])
def test_a_parameter_that_was_written_to_is_taken_over(counted: bool, monkeypatch: pytest.MonkeyPatch):
    if not counted:  # as for a DTensor, whose writes are not counted
        monkeypatch.setattr(MainWeights, "_version", lambda self, name: None)
    parameter = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    mains = MainWeights([("p", parameter)], copies=True)
    main = mains.by_name["p"]
    with torch.no_grad():
        main += 2**-10  # less than the parameter can show
        mains.round_into_parameters()
        mains.lend_gradients()
        assert main.tolist() == [1 + 2**-10, 2 + 2**-10]
        parameter[0] = 4.0
        mains.lend_gradients()
    # Element by element, so that it does not depend on which of them a process updates.
    assert main.tolist() == [4.0, 2 + 2**-10]
    parameter.data = parameter.data * 0.5  # other memory, and no write
    mains.lend_gradients()
    assert main.tolist() == [2.0, 1.0]


@cache
def by_hand(dtype: torch.dtype, steps: int = STEPS) -> tuple[dict, dict, list]:
    """With torch alone: gradients summed in fp32, an optimizer over fp32 copies, rounding after each step, a scale."""
    net = plain.model(4).to(dtype)
    mains = [nn.Parameter(p.detach().float()) for p in net.parameters()]
    for p in net.parameters():
        p.grad_dtype = torch.float32
    optimizer = torch.optim.AdamW(mains, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", **SCALE, enabled=dtype == torch.float16)
    history = []
    for n in range(steps):
        for a, b in zip(*(part.chunk(MICROBATCHES) for part in batch(n, dtype)), strict=True):
            scaler.scale(loss_fn(net(a), b) / MICROBATCHES).backward()
        for main, p in zip(mains, net.parameters(), strict=True):
            main.grad, p.grad = p.grad, None
        scaler.unscale_(optimizer)
        sound = all(main.grad.isfinite().all() for main in mains)
        norm = nn.utils.clip_grad_norm_(mains, 0.1) if sound else None
        scaler.step(optimizer)
        scaler.update()
        history.append((not sound, norm, scaler.get_scale()))
        with torch.no_grad():
            for main, p in zip(mains, net.parameters(), strict=True):
                p.copy_(main)
    named = dict(net.named_parameters())
    own_mains = {n: main.detach() for n, main in zip(named, mains, strict=True)}
    return {n: p.detach() for n, p in named.items()}, own_mains, history


def pipelined(rank: int, dtype: torch.dtype, ranks: int, schedule: str, steps: int = STEPS):
    torch.set_num_threads(1)
    options = {"microbatches": MICROBATCHES, "ranks": ranks, "schedule": schedule}
    with Pipeline(plain.model(4).to(dtype), loss_fn, **options) as pipe:
        scaler = GradScaler(**SCALE, enabled=dtype == torch.float16)
        optimizer = PipelineOptimizer(
            pipe, torch.optim.AdamW, lr=1e-3, clip=0.1, scaler=scaler, main_weights=True
        )
        history = []
        for n in range(steps):
            pipe.step(*batch(n, dtype))
            assert {p.grad.dtype for p in pipe.parameters()} == {torch.float32}
            done = optimizer.step()
            history.append((done.skipped, done.grad_norm, scaler.scale))
        weights = {n: p.detach() for n, p in pipe.named_parameters()}
        return weights, optimizer.state_dict()["main_weights"], history


def assert_same(parts: list, dtype: torch.dtype) -> None:
    weights, mains, history = by_hand(dtype)
    assert {skipped for skipped, _, _ in history} == ({True, False} if dtype == torch.float16 else {False})
    assert all(told == history for *_, told in parts)
    for n, theirs in enumerate((weights, mains)):
        ours = {name: value for part in parts for name, value in part[n].items()}
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name].dtype == theirs[name].dtype
            assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize(
    ("dtype", "ranks", "schedule"),
    [
        (torch.float16, 2, "zb-v"),
        (torch.bfloat16, 4, "zb-h1"),
        *exhaustive((torch.float16, 4, "1f1b"), (torch.bfloat16, 2, "zb-v")),
    ],
)
def test_threads_train_16_bits_as_torch_does_by_hand(dtype: torch.dtype, ranks: int, schedule: str):
    assert_same([pipelined(0, dtype, ranks, schedule)], dtype)


@pytest.mark.parametrize("dtype", slow(torch.float16, torch.bfloat16))
def test_processes_train_16_bits_as_torch_does_by_hand(processes: LocalProcesses, dtype: torch.dtype):
    assert_same(processes.run(2, pipelined, dtype, 2, "1f1b"), dtype)


@pytest.mark.parametrize("in_processes", [False, *exhaustive(True)])
def test_copies_of_a_stage_keep_their_gradients_in_float32(request, in_processes: bool):
    case = (torch.bfloat16, 2, "chimera", 3)
    parts = (
        request.getfixturevalue("processes").run(2, pipelined, *case)
        if in_processes
        else [pipelined(0, *case)]
    )
    _, mains, _ = by_hand(torch.bfloat16, 3)
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
