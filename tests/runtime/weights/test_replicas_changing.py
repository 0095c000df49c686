"""Replicas of models that do not do the same in every step: experts, and weights that are frozen and unfrozen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.base.errors import PenstockError, ReplicaError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ExecutionOptions, ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive

WIDTH, M, ROWS = plain.WIDTH, 4, 2


class Experts(nn.Module):
    """Two experts; a microbatch goes to the first, the second or both, as the sums of its rows say."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0].sum() > 0
        y = x + self.experts[0 if chosen else 1](x)
        return y + self.experts[1](y.tanh()) if x[:, 1].sum() > 0.5 else y


def model(kind: str = "plain") -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "experts":
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, WIDTH), Experts())
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    if kind == "tied":
        net[3].weight = net[0].weight
    return net


def batch(step: int) -> tuple[Tensor, Tensor]:
    return plain.batch(step, 2 * M * ROWS)


def freeze(net: nn.Module, names: str, tied: bool = False) -> None:
    """Freeze the layers of these numbers, and no others."""
    for name, p in net.named_parameters():
        if name != "3.weight" or not tied:  # it is 0.weight
            p.requires_grad_(name[0] not in names)


def alone(kind: str, steps: int, frozen: tuple[str, ...] | None) -> list[dict[str, Tensor | None]]:
    """The gradients of every step, and at last the weights."""
    net = model(kind)
    told: list[dict[str, Tensor | None]] = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        if frozen is not None:
            freeze(net, frozen[step], kind == "tied")
        plain.step(net, nn.functional.mse_loss, *batch(step), 2 * M)
        told.append({n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return [*told, {n: p.detach().clone() for n, p in net.named_parameters()}]


def trained(
    rank: int, kind: str, schedule: str, mesh: MeshShape, frozen: tuple[str, ...] | None, zero: bool = False
):
    net = model(kind)
    told: list[dict[str, Tensor | None]] = []
    with Pipeline(
        net, nn.functional.mse_loss, microbatches=2 * M // mesh.dp, schedule=schedule, mesh=mesh, timeout=300,
        parallel=ParallelOptions(bucket_bytes=200),
        # The sums of a microbatch's rows choose its experts, so two as one may have others.
        execution=ExecutionOptions(check_split=kind != "experts"),
    ) as pipe:  # fmt: skip
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, zero=zero)
        for step in range(6 if frozen is None else len(frozen)):
            if frozen is not None:
                freeze(net, frozen[step], kind == "tied")
            pipe.step(*batch(step))
            parameters = {} if zero else dict(pipe.named_parameters())  # ZeRO's gradients are divided
            told.append({n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()})
            optimizer.step()
        return [*told, {n: p.detach().clone() for n, p in pipe.named_parameters()}]


def check(told: list, kind: str, frozen: tuple[str, ...] | None, steps: int = 6, grads: bool = True) -> None:
    want = alone(kind, steps, frozen)
    seen: dict[str, Tensor] = {}
    for states in told:
        for n, (found, expected) in enumerate(zip(states, want, strict=True)):
            for name, value in found.items() if grads or n == steps else ():
                assert (value is None) == (expected[name] is None), (n, name)
                if value is not None:
                    torch.testing.assert_close(
                        value, expected[name], msg=lambda m, n=n, k=name: f"{n} {k} {m}"
                    )
        for name, value in states[-1].items():
            assert torch.equal(value, seen.setdefault(name, value)), name


SCHEDULES = ["1f1b", "zb-h1", "dualpipe"]


@pytest.mark.slow
def test_experts_used_in_some_microbatches_only_have_the_gradients_of_plain_pytorch(
    processes: LocalProcesses,
):
    mesh = MeshShape(2, 2, 1)
    cases = [("experts", schedule, mesh, None) for schedule in SCHEDULES]
    *told, with_zero = run_cases(processes, 4, trained, [*cases, ("experts", "1f1b", mesh, None, True)])
    for by_rank in told:
        check(by_rank, "experts", None)
    check(with_zero, "experts", None, grads=False)


# Layers that are frozen in each step: unfrozen for one, for several, one after the other, and all again.
FROZEN = ("01", "01", "1", "12", "12", "12", "", "23", "", "012", "3", "3")


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("1f1b", "plain"),
        ("zb-h1", "tied"),
        ("dualpipe", "tied"),
        *exhaustive(("1f1b", "tied"), ("dualpipe", "plain")),
    ],
)
def test_weights_frozen_and_unfrozen_between_steps_have_the_gradients_of_plain_pytorch(schedule, kind):
    told = trained(0, kind, schedule, MeshShape(2, 1, 1), FROZEN)
    if kind == "tied":  # one parameter, frozen by either of its names
        told = [{**state, "3.weight": state["0.weight"]} for state in told]
        told = [{n: v for n, v in state.items() if n != "3.weight"} for state in told]
    check([told], kind, FROZEN, 12)


@pytest.mark.slow
def test_weights_frozen_and_unfrozen_in_processes(processes: LocalProcesses):
    kinds = [(kind, schedule) for schedule in SCHEDULES for kind in ("plain", "tied")]
    cases = [(*kind, MeshShape(2, 2, 1), FROZEN) for kind in kinds]
    for (kind, _), told in zip(kinds, run_cases(processes, 4, trained, cases), strict=True):
        check(told, kind, FROZEN, 12)


THAWED_BY_ZERO = ("", "", "12", "12", "1", "")


def test_zero_freezes_and_refuses_to_unfreeze_what_it_did_not_divide(processes: LocalProcesses):
    mesh = MeshShape(1, 2, 1)
    told = processes.run(2, trained, "plain", "1f1b", mesh, THAWED_BY_ZERO, True)
    check(told, "plain", THAWED_BY_ZERO, grads=False)
    for error in processes.run(2, thawed, mesh):
        assert "parameter '1.weight' began to require a gradient after ZeRO" in error


def thawed(rank: int, mesh: MeshShape) -> str:
    net = model()
    freeze(net, "1")
    with Pipeline(net, nn.functional.mse_loss, microbatches=M, mesh=mesh, timeout=300) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, zero=True)
        pipe.step(*batch(0))
        optimizer.step()
        freeze(net, "")
        with pytest.raises(PenstockError) as caught:
            pipe.step(*batch(1))
        assert pipe.steps == 1
        return str(caught.value)


def frozen_on_one(rank: int, mesh: MeshShape, schedule: str, alone: int) -> tuple[str, str]:
    net = model()
    with Pipeline(
        net, nn.functional.mse_loss, microbatches=M, mesh=mesh, timeout=300, schedule=schedule
    ) as pipe:
        pipe.step(*batch(0))
        if torch.distributed.get_rank() == alone:
            freeze(net, "0")
        with pytest.raises(PenstockError) as caught:
            pipe.step(*batch(1))
        return type(caught.value).__name__, str(caught.value)


def test_a_weight_that_is_frozen_on_one_replica_alone_is_refused_by_name_on_every_process(
    processes: LocalProcesses,
):
    cases = [(MeshShape(1, 2, 1), "1f1b", 1), (MeshShape(2, 1, 1), "dualpipe", 0)]
    replicas, copies = run_cases(processes, 2, frozen_on_one, cases)
    assert [kind for kind, _ in replicas] == [ReplicaError.__name__] * 2
    assert all("'0.weight' is frozen on replica(s) [1] of 2" in text for _, text in replicas)
    assert all("'0.weight' is frozen on rank(s) [0] of the ranks (0, 1)" in text for _, text in copies)
