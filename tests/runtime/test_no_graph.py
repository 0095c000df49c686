"""A step whose losses have no graph trains nothing, and is refused; a step in which only some have none is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.base.errors import PenstockError, StageError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain


def detached(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.detach(), target)


def without_grad(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return nn.functional.mse_loss(output, target)


class Constant:
    """A loss that is constant in some microbatches, told by their targets' first number."""

    def __init__(self, constant: list[int]) -> None:
        self.constant = constant

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if int(target[0, 0]) in self.constant:
            return torch.zeros(())
        return nn.functional.mse_loss(output, target)


def numbered(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = plain.batch(0, 2 * microbatches)
    y[:, 0] = torch.arange(microbatches).repeat_interleave(2)
    return x, y


class Cut(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


def head_frozen_behind_a_cut() -> nn.Sequential:
    net = plain.model(4)
    net[2].append(Cut())
    return net[:3].append(net[3].requires_grad_(False))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("check_finite", [True, False])
@pytest.mark.parametrize("loss", [detached, without_grad])
def test_a_loss_without_a_graph_is_refused_and_the_next_step_is_sound(ranks, family, check_finite, loss):
    net, cut = plain.model(4), True

    def sometimes(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(output, target) if cut else nn.functional.mse_loss(output, target)

    execution = ExecutionOptions(check_finite=check_finite)
    with Pipeline(net, sometimes, microbatches=4, ranks=ranks, schedule=family, execution=execution) as pipe:
        with pytest.raises(StageError, match="no microbatch's loss has a graph"):
            pipe.step(*plain.batch(0, 8))
        assert pipe.steps == 0
        assert all(p.grad is None for p in net.parameters())
        cut = False
        losses = pipe.step(*plain.batch(0, 8)).losses
    other = plain.model(4)
    assert torch.equal(losses, plain.step(other, nn.functional.mse_loss, *plain.batch(0, 8), 4)[0])
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def refused(rank: int, where: str) -> list[str]:
    net = head_frozen_behind_a_cut() if where == "layer" else plain.model(4)
    loss = detached if where == "loss" else nn.functional.mse_loss
    texts = []
    with Pipeline(net, loss, microbatches=4, ranks=4, timeout=300) as pipe:
        for _ in range(2):
            try:
                pipe.step(*plain.batch(0, 8))
            except PenstockError as error:
                texts.append(f"{type(error).__name__}: {error}")
        texts.append(str(pipe.steps))
    return texts


@pytest.mark.parametrize("where", ["loss", "layer"])
def test_every_process_says_the_same_also_where_only_another_rank_has_something_to_train(
    processes: LocalProcesses, where
):
    told = processes.run(4, refused, where)
    for texts in (*told, refused(0, where)):
        assert [text.partition(" (")[0] for text in texts[:2]] == [
            f"StageError: step {n}: no microbatch's loss has a graph" for n in (1, 2)
        ]
        assert texts[2:] == ["0"]


def test_losses_without_a_graph_in_some_microbatches_are_not_refused():
    x, y = numbered(4)
    net, other = plain.model(4), plain.model(4)
    with Pipeline(net, Constant([0, 2, 3]), microbatches=4, ranks=2) as pipe:
        pipe.step(x, y)
    (nn.functional.mse_loss(other(x[2:4]), y[2:4]) / 4).backward()
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def of_processes(rank: int, constant: list[int]) -> str:
    with Pipeline(
        plain.model(2), Constant(constant), microbatches=2, mesh=MeshShape(pp=2, dp=2), timeout=300
    ) as pipe:
        try:
            pipe.step(*numbered(4))
        except StageError as error:
            return str(error).partition(" (")[0]
        return "trained" if all(p.grad is not None for p in pipe.parameters()) else "not trained"


def test_of_two_replicas_one_may_be_without_a_graph(processes: LocalProcesses):
    assert processes.run(4, of_processes, [0, 1]) == ["trained"] * 4
    assert processes.run(4, of_processes, [0, 1, 2, 3]) == ["step 1: no microbatch's loss has a graph"] * 4


def of_those_that_count(rank: int) -> bool:
    counts = {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0}
    with Pipeline(
        plain.model(2),
        Constant([0, 1]),
        microbatches=2,
        mesh=MeshShape(pp=2, dp=2),
        reduction=lambda target: counts[int(target[0, 0])],
        timeout=300,
    ) as pipe:
        pipe.step(*numbered(4))
        return all(p.grad is not None for p in pipe.parameters())


def test_what_does_not_count_may_be_the_only_loss_with_a_graph_of_a_replica(processes: LocalProcesses):
    assert processes.run(4, of_those_that_count) == [True] * 4


def test_a_model_that_is_frozen_as_a_whole_may_take_a_step():
    net = plain.model(4).requires_grad_(False)
    with Pipeline(net, nn.functional.mse_loss, microbatches=4, ranks=2) as pipe:
        losses = pipe.step(*plain.batch(0, 8)).losses
    assert torch.equal(losses, plain.train(4, 4, steps=1)[0][0])


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (lambda output, target: (output > target).sum(), "a int64 tensor"),
        (lambda output, target: {"right": (output > target).any()}, "a bool tensor.*for 'right'"),
        (lambda output, target: (output - target).sum().to(torch.complex64), "a complex64 tensor"),
    ],
)
def test_a_loss_of_another_dtype_is_refused_by_name(loss, given):
    with (
        Pipeline(plain.model(2), loss, microbatches=2, ranks=2) as pipe,
        pytest.raises(StageError, match=f"real floating-point dtype.*returned {given}"),
    ):
        pipe.step(*plain.batch(0, 4))
