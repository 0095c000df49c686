"""Writes that torch does not count: the kernel of batch normalisation changes statistics and leaves their version alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline
from penstock.base.errors import StageError
from penstock.runtime.model.python_state import python_state_kept
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.stage.compute.module_buffers import Mark, snapshot
from tests.support import plain

WIDTH = plain.WIDTH


class Slope(nn.Module):
    """Adds a gradient of its own, which torch.func takes; it does not run under the hooks that count saved bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.vmap(torch.func.grad(lambda row: torch.tanh(self.energy(row)).sum()))(x)


class NormalisingLoss(nn.Module):
    """Has running statistics without the counter that nn.BatchNorm1d has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(F.batch_norm(output, self.mean, self.var, training=True), target)


def test_the_kernel_of_batch_normalisation_does_not_count_its_writes():
    norm = nn.BatchNorm1d(2)
    version, before = norm.running_mean._version, norm.running_mean.clone()
    norm(torch.randn(3, 2))
    assert norm.running_mean._version == version, "torch counts them now: the comparisons of values can go"
    assert not torch.equal(norm.running_mean, before)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_forward_that_runs_again_to_be_counted_updates_statistics_once(microbatches: int):
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.BatchNorm1d(WIDTH), Slope()) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    x, y = plain.batch(0, 8)
    for part in x.chunk(microbatches):
        nets[0](part)
    with Pipeline(nets[1], F.mse_loss, microbatches=microbatches, ranks=1) as pipe:
        pipe.step(x, y)
    assert all(map(torch.equal, nets[0].buffers(), nets[1].buffers()))


def test_what_runs_to_be_thrown_away_leaves_statistics_as_they_were():
    norm = nn.BatchNorm1d(2)
    with python_state_kept([norm]):
        norm(torch.randn(3, 2))
    assert norm.running_mean.tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.full((1,), float("nan")).expand(4), id="expanded"),
        pytest.param(lambda: torch.ones(4).to(torch.float8_e4m3fn), id="float8"),
        pytest.param(lambda: torch.ones(3, device="meta"), id="meta"),
        pytest.param(lambda: torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), id="nested"),
    ],
)
def test_tensors_of_every_kind_are_the_same_as_long_as_nothing_is_written(make: Callable[[], Tensor]):
    value = make()
    mark, restore = Mark(value), snapshot(value)
    version = value._version
    restore()
    assert mark.holds(value)
    assert value._version == version


@pytest.mark.parametrize("schedule", ["dualpipe", "chimera"])
def test_statistics_that_the_loss_changes_are_refused_where_the_last_stage_has_copies(schedule: str):
    with (
        Pipeline(plain.model(4), NormalisingLoss(), microbatches=4, ranks=2, schedule=schedule) as pipe,
        pytest.raises(StageError, match=r"the loss function changes its buffer loss_fn\.mean"),
    ):
        pipe.step(*plain.batch(0, 8))


@pytest.mark.parametrize("form", ["one rank each", "copies", "shared"])
def test_statistics_that_a_user_updates_between_steps_are_those_of_every_copy(form: str):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH).eval()
    own = nn.BatchNorm1d(WIDTH)
    net = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), norm if form == "shared" else own
    )
    x, y = plain.batch(0, 8)
    schedule = "dualpipe" if form == "copies" else "1f1b"
    with Pipeline(net, F.mse_loss, microbatches=2, ranks=2, schedule=schedule) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        pipe.step(x, y)
        optimizer.step()
        net.train()
        net(3 * x + 1)
        net.eval()
        found = pipe.evaluate(x, y).loss
    torch.testing.assert_close(found, F.mse_loss(net(x), y), check_dtype=False)
