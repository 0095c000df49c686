"""Buffers that forwards change, and copies that come apart: in threads, in processes, with stages that two ranks hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.base.errors import NonFiniteError, ReplicaError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import build_schedule
from penstock.schedule.ops import Kind
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss
from tests.support import plain
from tests.support.groups import outcome, run_cases
from tests.support.lanes import slow

WIDTH, M, ROWS, STEPS = plain.WIDTH, 8, 3, 3
DUALPIPE, CHIMERA = ("dualpipe", MeshShape(2, 1, 1)), ("chimera", MeshShape(2, 1, 1))
ROUND_TRIP = ("round-trip", MeshShape(4, 1, 1))
TWO, REPLICAS, BOTH = (
    ("1f1b", MeshShape(1, 2, 1)),
    ("1f1b", MeshShape(2, 2, 1)),
    ("dualpipe", MeshShape(2, 2, 1)),
)


def model(momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH, momentum=momentum),
        nn.Tanh(),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=momentum)),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    return plain.batch(step, M * ROWS)


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(out, y)


def order(schedule: str) -> list[int]:
    """The microbatches, those of one copy after those of the others, from the first holder on."""
    if schedule not in ("chimera", "round-trip"):
        return list(range(M))
    made = build_schedule(schedule, {"chimera": 2, "round-trip": 4}[schedule], M)
    ops = [op for rank in made.placement.holders[0] for op in made.ops(rank)]
    return [op.microbatch for op in ops if op.kind == Kind.F and op.stage == 0]


def pipe_of(net: nn.Module, schedule: str, mesh: MeshShape, **parallel: object) -> Pipeline:
    options = ParallelOptions(**parallel)
    return Pipeline(
        net, loss_of, microbatches=M // mesh.dp, schedule=schedule, mesh=mesh, timeout=300, parallel=options
    )


def train_plainly(net: nn.Module, frozen_after: int, order: list[int]) -> Tensor:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        net.train(step < frozen_after)
        x, y = batch(step)
        for n in order:
            (loss_of(net(x.chunk(M)[n]), y.chunk(M)[n]) / M).backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    return plain.step(net, loss_of, *batch(99), M)[0].mean()


def trained(rank: int, schedule: str, mesh: MeshShape, momentum: float | None, frozen_after: int):
    with pipe_of(model(momentum), schedule, mesh, check_replicas=1) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(STEPS):
            pipe.train(step < frozen_after)
            pipe.step(*batch(step))
            optimizer.step()
            optimizer.zero_grad()
        return pipe.evaluate(*batch(99)).loss, pipe.state_dict()


@pytest.mark.parametrize(
    ("schedule", "mesh", "momentum", "frozen_after"),
    [(*DUALPIPE, 0.1, STEPS), (*CHIMERA, None, STEPS), (*DUALPIPE, None, 1), (*ROUND_TRIP, 0.1, STEPS)],
)
def test_copies_of_batch_norm_have_the_statistics_of_plain_pytorch(schedule, mesh, momentum, frozen_after):
    check([trained(0, schedule, mesh, momentum, frozen_after)], schedule, momentum, frozen_after)


def check(told: list, schedule: str, momentum: float | None, frozen_after: int) -> None:
    net = model(momentum)
    loss = train_plainly(net, frozen_after, order(schedule))
    for found, state in told:
        torch.testing.assert_close(found, loss, rtol=1e-4, atol=1e-5)
        assert torch.equal(found, told[0][0])
        for name, value in state.items():
            torch.testing.assert_close(value, net.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)
            assert all(torch.equal(value, other[name]) for _, other in told if name in other), name


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [(*DUALPIPE, 0.1, STEPS), (*TWO, None, STEPS), (*TWO, 0.1, 1)]),
        *slow(
            (4, [(*BOTH, 0.1, STEPS), (*REPLICAS, None, STEPS), (*BOTH, None, 1), (*ROUND_TRIP, None, STEPS)])
        ),
    ],
)
def test_copies_of_batch_norm_in_processes(processes: LocalProcesses, ranks: int, cases: list):
    told = run_cases(processes, ranks, trained, cases)
    for (schedule, _, momentum, frozen_after), parts in zip(cases, told, strict=True):
        check(parts, schedule, momentum, frozen_after)


def test_one_copy_has_the_very_buffers_of_plain_pytorch():
    net, other = model(), model()
    with Pipeline(net, loss_of, microbatches=M, ranks=2, timeout=300) as pipe:
        pipe.step(*batch(0))
        plain.step(other, loss_of, *batch(0), M)
        for (name, a), b in zip(net.named_buffers(), other.buffers(), strict=True):
            assert torch.equal(a, b), name


class Mean(nn.Module):
    """Keeps a running mean that is none of PyTorch's own, and counts its forwards."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=persistent)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
            self.count += 1
        return x * self.table


def own_buffers(rank: int, schedule: str, mesh: MeshShape, rule: str, persistent: bool = True):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mean(persistent), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    with pipe_of(net, schedule, mesh, buffers=rule, check_replicas=1) as pipe:
        try:
            for step in range(2):
                pipe.step(*batch(step))
        except ReplicaError as error:
            return error.name, str(error), pipe.steps, pipe.state_dict()
        pipe.evaluate(*batch(0))
        return None, "", pipe.steps, pipe.state_dict()


def test_other_buffers_follow_the_rule_and_are_refused_without_one(processes: LocalProcesses):
    """Scratch buffers stay each copy's own."""
    cases = [(*layout, rule) for layout in (DUALPIPE, TWO) for rule in ("refuse", "mean", "first")]
    *by_case, scratch = run_cases(processes, 2, own_buffers, [*cases, (*TWO, "refuse", False)])
    assert [steps for _, _, steps, _ in [*scratch, own_buffers(0, *DUALPIPE, "refuse", False)]] == [2] * 3
    for (*layout, rule), told in zip(cases, by_case, strict=True):
        if layout == [*DUALPIPE]:
            told.append(own_buffers(0, *DUALPIPE, rule))
        for name, text, steps, state in told:
            assert name == ("1.mean" if rule == "refuse" else None)
            assert ("buffers='mean' or buffers='first'" in text) == (rule == "refuse")
            assert steps == (0 if rule == "refuse" else 2)
            if "1.mean" in state:
                assert bool(state["1.mean"].any()) == (rule != "refuse")
                assert int(state["1.count"]) == (0 if rule == "refuse" else M)  # of one copy, in two steps
        states = [state["1.mean"] for *_, state in told if "1.mean" in state]
        assert all(torch.equal(state, states[0]) for state in states)


def restored(rank: int, schedule: str, mesh: MeshShape) -> None:
    with pipe_of(model(), schedule, mesh) as pipe:
        pipe.step(*batch(0))
        state = {name: value.clone() for name, value in pipe.state_dict().items()}
        loss = pipe.evaluate(*batch(1)).losses
        x, y = batch(1)
        with pytest.raises(NonFiniteError):
            pipe.step(x.clone().index_fill_(0, torch.tensor([M * ROWS - 1]), float("nan")), y)
        assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())
        assert torch.equal(pipe.evaluate(*batch(1)).losses, loss)
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.step(*batch(2))
        assert not torch.equal(pipe.evaluate(*batch(1)).losses, loss)
        pipe.load_state_dict(state)
        assert torch.equal(pipe.evaluate(*batch(1)).losses, loss)


def test_after_a_failed_step_buffers_are_as_before_it_and_a_loaded_state_is_that_of_all_copies(
    processes: LocalProcesses,
):
    restored(0, *DUALPIPE)
    processes.run(2, restored, *TWO)


def damage(
    rank: int, schedule: str, mesh: MeshShape, name: str, alone: int, zero: bool
) -> tuple[str, str, int]:
    """One process changes a parameter or a buffer of its own; the check comes every second step."""
    with pipe_of(model(), schedule, mesh, check_replicas=2) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, zero=zero)
        steps = 0
        try:
            for step in range(5):
                if step == 2 and torch.distributed.get_rank() == alone:
                    with torch.no_grad():
                        pipe.state_dict()[name].view(-1)[-1] += 1e-3
                pipe.step(*batch(step))
                optimizer.step()
                steps += 1
        except ReplicaError as error:
            return error.name, str(error), steps
        return "", "", steps


@pytest.mark.parametrize(
    ("layout", "name", "alone", "zero", "where"),
    [
        (TWO, "3.1.running_mean", 1, True, "(pp 0, dp 1, tp 0)"),
        *slow(
            (REPLICAS, "0.weight", 1, False, "(pp 0, dp 1, tp 0)"),
            (REPLICAS, "3.0.bias", 2, True, "(pp 1, dp 0, tp 0)"),
        ),
        *slow((BOTH, "1.weight", 3, False, "(pp 1, dp 1, tp 0)")),
    ],
)
def test_processes_whose_copies_come_apart_all_stop_with_the_name_and_the_place(
    processes: LocalProcesses, layout: tuple, name: str, alone: int, zero: bool, where: str
):
    for found, text, steps in processes.run(layout[1].ranks, damage, *layout, name, alone, zero):
        assert found == name
        assert where in text
        assert steps == 2


def test_threads_whose_copies_come_apart_stop_with_the_name():
    with pipe_of(model(), *DUALPIPE, check_replicas=2) as pipe:
        for step in range(2):
            pipe.step(*batch(step))
        own, *_, other = [
            layers[name]
            for module in pipe.stage_modules()
            for layers in [dict(module.whole_model_parameters())]
            for name in ["3.0.weight"]
            if name in layers
        ]
        kept, own.data, other.data = own.data, own.data + 1, other.data - 1
        with pytest.raises(ReplicaError, match=r"parameter '3\.0\.weight' has several copies"):
            pipe.step(*batch(2))
        own.data = other.data = kept
        *_, last = [
            m for module in pipe.stage_modules() for m in module.modules() if isinstance(m, nn.BatchNorm1d)
        ]
        last.running_mean.add_(1)
        with pytest.raises(ReplicaError, match=r"buffer '\d\.1\.running_mean' are no longer the same"):
            pipe.step(*batch(2))
        assert pipe.steps == 2


def cut(rank: int, alone: int) -> tuple[str, str]:
    config = ModelConfig(vocabulary=32, width=16, layers=2, heads=4, kv_heads=2, hidden=32)
    tokens = torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(0))
    options = {"microbatches": 2, "mesh": MeshShape(1, 2, 2), "parallel": ParallelOptions(check_replicas=1)}
    with Pipeline(layers(config), next_token_loss, timeout=300, **options) as pipe:
        pipe.step(tokens, tokens)
        name, parameter = list(pipe.named_parameters())[2]
        if torch.distributed.get_rank() == alone:
            with torch.no_grad():
                getattr(parameter, "_local_tensor", parameter).view(-1)[0] += 1e-3
        with pytest.raises(ReplicaError) as caught:
            pipe.step(tokens, tokens)
        assert caught.value.name == name
        return str(caught.value), name


@pytest.mark.slow
def test_parts_of_cut_matrices_are_compared_over_replicas(processes: LocalProcesses):
    for text, name in processes.run(4, cut, 3):
        assert repr(name) in text
        assert "(pp 0, dp 1, tp 1)" in text


def renormalising(
    rank: int, mesh: MeshShape | None, schedule: str, trains: bool, sharding: dict[str, Any] | None = None
) -> str:
    net = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 4))
    parallel = ParallelOptions(**(sharding or {}))
    options = {"mesh": mesh, "ranks": None if mesh is not None else 2, "timeout": 300, "parallel": parallel}
    with Pipeline(net, loss_of, microbatches=4, schedule=schedule, **options) as pipe:
        if sharding is not None:
            PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        return outcome(pipe.step if trains else pipe.evaluate, torch.arange(8), torch.zeros(8, 4))


def test_a_forward_that_writes_into_a_weight_of_which_there_are_copies_is_refused(processes: LocalProcesses):
    told = [renormalising(0, None, "dualpipe", trains) for trains in (True, False)]
    cases = [(MeshShape(pp=1, dp=2), "1f1b", trains) for trains in (True, False)]
    cases += [(*cases[0], {"shard": shard}) for shard in ("optimizer", "gradients", "weights")]
    told += [text for by_rank in run_cases(processes, 2, renormalising, cases) for text in by_rank]
    assert all("the forward writes into parameter 0.weight" in text for text in told), told
