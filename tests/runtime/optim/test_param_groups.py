"""A PipelineOptimizer is a torch optimizer to others: schedulers and programs that change its groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

import penstock
from penstock.runtime.workers.pool import LocalProcesses
from tests.runtime.optim import test_optimizer_mesh as mesh
from tests.support import plain
from tests.support.groups import run_cases
from tests.support.states import assert_equal

LAYERS, MICROBATCHES, STEPS = 4, 4, 5
MATRICES = [f"{n}.0.weight" for n in range(LAYERS)]
MUON = {"names": MATRICES, "optimizer": torch.optim.Muon, "lr": 0.05}
Optimizer = torch.optim.Optimizer


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.03, total_steps=STEPS + 1)


def cyclic(optimizer: Optimizer) -> LRScheduler:
    return CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False)


def of_transformers(optimizer: Optimizer) -> LRScheduler:
    get_scheduler = pytest.importorskip("transformers").get_scheduler
    return get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=STEPS)


def unsplit(make: Any, schedule: Any, muon: bool) -> dict[str, Tensor]:
    net = plain.model(LAYERS)
    named = dict(net.named_parameters())
    rest = [p for name, p in named.items() if not muon or name not in MATRICES]
    optimizers = [make(rest, lr=0.01)]
    if muon:
        optimizers.append(torch.optim.Muon([named[name] for name in MATRICES], lr=0.05))
    schedulers = [schedule(one) for one in optimizers]
    for n in range(STEPS):
        plain.step(net, nn.functional.mse_loss, *plain.batch(n, 2 * MICROBATCHES), MICROBATCHES)
        for one in (*optimizers, *schedulers):
            one.step()
        net.zero_grad()
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize(
    ("make", "schedule", "muon"),
    [
        (torch.optim.AdamW, one_cycle, True),
        (torch.optim.SGD, one_cycle, False),
        (torch.optim.Adagrad, cyclic, False),
        (torch.optim.AdamW, of_transformers, True),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_a_scheduler_of_all_ranks_gives_the_weights_of_torch_alone(
    make: Any, schedule: Any, muon: bool, given: bool
):
    net = plain.model(LAYERS)
    with penstock.Pipeline(net, nn.functional.mse_loss, microbatches=MICROBATCHES, ranks=4) as pipe:
        optimizer = penstock.PipelineOptimizer(
            pipe, make, groups=[MUON] if muon else None, lr=0.01, lr_scheduler=schedule if given else None
        )
        scheduler = None if given else schedule(optimizer)
        for n in range(STEPS):
            pipe.step(*plain.batch(n, 2 * MICROBATCHES))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    assert_equal(dict(net.named_parameters()), unsplit(make, schedule, muon))


def test_groups_and_state_are_those_of_a_torch_optimizer():
    net = plain.model(LAYERS)
    with penstock.Pipeline(net, nn.functional.mse_loss, microbatches=2, ranks=2, schedule="zb-v") as pipe:
        optimizer = penstock.PipelineOptimizer(
            pipe, torch.optim.SGD, groups=[{"names": MATRICES, "momentum": 0.5}], lr=0.0
        )
        assert isinstance(optimizer, Optimizer)
        matrices, rest = (group["params"] for group in optimizer.param_groups)
        assert all(a is net.get_parameter(name) for a, name in zip(matrices, MATRICES, strict=True))
        assert {*map(id, matrices), *map(id, rest)} == {id(p) for p in net.parameters()}
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        for rate in (0.0, 0.5):
            for group in optimizer.param_groups:
                group["lr"] = rate
            before = [p.detach().clone() for p in net.parameters()]
            pipe.step(*plain.batch(0, 4))
            assert optimizer.step().lr == (rate, rate)
            assert all(torch.equal(a, b) == (not rate) for a, b in zip(before, net.parameters(), strict=True))
        assert seen == [1, 1]
        assert set(optimizer.state) == set(matrices)
        # What is written into one rank's optimizer is no other rank's, and stays.
        optimizer.optimizers[1].param_groups[0]["dampening"] = 0.25
        pipe.step(*plain.batch(0, 4))
        optimizer.step()
        assert [o.param_groups[0]["dampening"] for o in optimizer.optimizers.values()] == [0, 0.25]


def test_what_ranks_would_not_follow_is_refused():
    with penstock.Pipeline(plain.model(2), nn.functional.mse_loss, microbatches=2, ranks=2) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        with pytest.raises(penstock.ConfigError, match="takes no closure"):
            optimizer.step(lambda: None)
        with pytest.raises(penstock.ConfigError, match="set_to_none"):
            optimizer.zero_grad(set_to_none=False)
        pipe.step(*plain.batch(0, 4))
        optimizer.add_param_group({"params": []})
        with pytest.raises(penstock.ConfigError, match="other parameters than at first"):
            optimizer.step()
        optimizer.param_groups.pop()
        optimizer.param_groups[0]["params"].pop()
        with pytest.raises(penstock.ConfigError, match="other parameters than at first"):
            optimizer.step()


def test_a_learning_rate_that_is_a_tensor_is_changed_on_every_rank():
    rate = torch.tensor(0.1)
    with penstock.Pipeline(plain.model(2), nn.functional.mse_loss, microbatches=2, ranks=2) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.SGD, lr=rate)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)  # after which each rank has a tensor of its own
        LambdaLR(optimizer, lambda step: 0.5)
        assert [float(o.param_groups[0]["lr"]) for o in optimizer.optimizers.values()] == pytest.approx(
            [0.05] * 2
        )


@pytest.mark.parametrize("schedule", [one_cycle, lambda o: ReduceLROnPlateau(o, patience=0)])
def test_a_checkpoint_keeps_a_scheduler_that_the_program_steps(tmp_path: Path, schedule: Any):
    def train(steps: int, ranks: int, folder: str) -> dict[str, Tensor]:
        net = plain.model(LAYERS)
        with penstock.Pipeline(net, nn.functional.mse_loss, microbatches=MICROBATCHES, ranks=ranks) as pipe:
            optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, groups=[MUON], lr=0.01)
            scheduler = schedule(optimizer)
            with penstock.Checkpoints(tmp_path / folder, pipe, optimizer, scheduler=scheduler) as checkpoints:
                checkpoints.load_newest()
                for _ in range(steps):
                    loss = pipe.step(*plain.batch(pipe.steps, 2 * MICROBATCHES)).loss
                    optimizer.step()
                    scheduler.step(*([loss] if isinstance(scheduler, ReduceLROnPlateau) else []))
                checkpoints.save()
        return {name: p.detach() for name, p in net.named_parameters()}

    expected = train(4, 4, "at once")
    train(2, 2, "in parts")
    assert_equal(train(2, 4, "in parts"), expected)


def test_a_checkpoint_takes_one_scheduler(tmp_path: Path):
    with penstock.Pipeline(plain.model(2), nn.functional.mse_loss, microbatches=2, ranks=2) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, lr_factor=lambda step: 1.0)
        with pytest.raises(penstock.ConfigError, match="has a scheduler of its own"):
            penstock.Checkpoints(tmp_path, pipe, optimizer, scheduler=LambdaLR(optimizer, lambda step: 1.0))
        other = torch.optim.SGD(pipe.parameters(), lr=0.1)
        with pytest.raises(penstock.ConfigError, match="it is of another one"):
            penstock.Checkpoints(tmp_path, pipe, optimizer, scheduler=LambdaLR(other, lambda step: 1.0))


def on_mesh(rank: int, shape: Any, zero: Any, given: bool) -> dict[str, Any]:
    """Train with a factor that the optimizer has, or that the program writes into the groups."""
    with mesh.pipe_on(shape) as pipe:
        factor = {"lr_factor": lambda step: 0.5**step} if given else {}
        optimizer = mesh.adamw(pipe, zero=zero, **factor)
        for n in range(3):
            pipe.step(*mesh.tokens(n))
            optimizer.step()
            for group in optimizer.param_groups if not given else ():
                group["lr"] = group["lr"] * 0.5
        return pipe.state_dict()


def on_one_rank(rank: int, shape: Any, zero: Any) -> tuple[str, bool]:
    """What is said if one rank alone changes an option, and whether the weights are as they were."""
    with mesh.pipe_on(shape) as pipe:
        optimizer = mesh.adamw(pipe, zero=zero)
        pipe.step(*mesh.tokens(0))
        optimizer.step()
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        pipe.step(*mesh.tokens(1))
        optimizer.param_groups[1]["lr"] = 0.25 if rank else 0.01
        with pytest.raises(penstock.ConfigError) as caught:
            optimizer.step()
        same = all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
        return str(caught.value), same


@pytest.mark.slow
def test_options_written_into_groups_count_on_every_process_alike(processes: LocalProcesses):
    shapes = [
        (penstock.MeshShape(pp=2), False),
        (penstock.MeshShape(pp=1, dp=2), "overlap"),
        (penstock.MeshShape(pp=1, tp=2), False),
    ]
    cases = [(*shape, given) for shape in shapes for given in (True, False)]
    told = run_cases(processes, 2, on_mesh, cases)
    for expected, found in zip(told[::2], told[1::2], strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    for by_rank in run_cases(processes, 2, on_one_rank, shapes):
        for said, same in by_rank:
            assert same
            assert "param_groups[1]['lr'] is as it was on rank 0" in said
            assert "0.25 on rank 1" in said
