"""What a batch may be: the dimension that is cut, objects, and microbatches with other rows in x than in y."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import BatchError, ConfigError, ExecutionOptions, Microbatches, Pipeline
from penstock.runtime.workers.pool import LocalProcesses

WIDTH, ROWS, TIME = 4, 6, 5


class Rotates(nn.Module):
    """Takes positions of shape (3, batch, time), as models of images and text do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * positions.sum(0).cos()[..., None]
        return out


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def made(*kinds: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() if kind is not nn.Linear else kind(WIDTH, WIDTH) for kind in kinds))


def test_each_value_has_a_dimension_of_its_own():
    net = made(Rotates, Rotates)
    x, y, positions = rows(ROWS, TIME, WIDTH), rows(TIME, ROWS, WIDTH), rows(3, ROWS, TIME)
    expected = F.mse_loss(net[1](net[0](x, positions), positions), y.transpose(0, 1))

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, target.transpose(0, 1))

    with Pipeline(net, loss_fn, microbatches=3, ranks=2, dims={"y": 1, "positions": 1}) as pipe:
        expected.backward()
        gradients = [p.grad for p in net.parameters()]
        pipe.zero_grad()
        torch.testing.assert_close(pipe.step(x, y, positions=positions).loss, expected.detach())
        for p, gradient in zip(net.parameters(), gradients, strict=True):
            torch.testing.assert_close(p.grad, gradient)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Adds(nn.Module):
    def forward(self, pair: Pair) -> Tensor:
        return pair.first + pair.second.T


def test_parts_of_a_value_have_dimensions_of_their_own():
    net = made(Adds, nn.Linear)
    x, y = Pair(rows(ROWS, WIDTH), rows(WIDTH, ROWS)), rows(ROWS, WIDTH)
    expected = F.mse_loss(net(x), y).detach()
    with Pipeline(net, F.mse_loss, microbatches=3, ranks=2, dims={"x": Pair(0, 1)}) as pipe:  # type: ignore[arg-type]
        torch.testing.assert_close(pipe.step(x, y).loss, expected)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"z": 1}, "dims has 'z', and the model has no input of that name; there may be positions, x, y"),
        (1, "dims must be a mapping"),
        ({"x": None}, "None is for keyword inputs"),
        ({"x": "1"}, "the input x: dims has '1' for it"),
        ({"positions": (1, 1)}, r"the keyword input positions: dims has \(1, 1\) for it"),
        ({"x": 3}, "the input x: batch sizes"),
    ],
)
def test_dimensions_that_cannot_be_are_refused(dims: Any, message: str):
    x = rows(ROWS, TIME, WIDTH)
    with (
        pytest.raises(ConfigError, match=message),
        Pipeline(made(Rotates, Rotates), F.mse_loss, microbatches=3, dims=dims) as pipe,
    ):
        pipe.step(x, x, positions=rows(3, ROWS, TIME))


class Data:
    """Tensors in an object that is not registered, as those of libraries of graphs are."""

    def __init__(self) -> None:
        self.store = SimpleNamespace(nodes=rows(ROWS, WIDTH))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((rows(ROWS, WIDTH), np.zeros(ROWS)), r"the input x\[1\] is a NumPy array.*torch\.from_numpy"),
        ((rows(ROWS, WIDTH), Data()), r"the input x\[1\] is a Data, which holds tensors.*Microbatches"),
        (
            torch.nested.nested_tensor([rows(2, 4)] * ROWS, layout=torch.jagged),
            "the input x is a nested tensor",
        ),
    ],
    ids=["numpy", "object", "nested"],
)
def test_what_holds_rows_and_is_no_tensor_is_refused(given: Any, message: str):
    """It went to every microbatch whole."""
    net = made(nn.Linear, nn.Linear)
    with Pipeline(net, F.mse_loss, microbatches=3) as pipe, pytest.raises(BatchError, match=message):
        pipe.step(given, rows(ROWS, WIDTH))


class Pools(nn.Module):
    """The mean of each graph's nodes, of an object."""

    def forward(self, data: Any) -> Tensor:
        return torch.stack([part.mean(0) for part in data.nodes.split(data.sizes)])


def graphs() -> tuple[list[Any], list[Tensor]]:
    sizes = [[2, 3], [4], [1, 1, 2]]
    parts = [SimpleNamespace(nodes=rows(sum(each), WIDTH), sizes=each) for each in sizes]
    return parts, [rows(len(each), WIDTH) for each in sizes]


def test_microbatches_of_objects_may_have_other_rows_than_their_targets():
    net = made(Pools, nn.Linear)
    parts, targets = graphs()
    losses = [F.mse_loss(net(part), y) * len(y) for part, y in zip(parts, targets, strict=True)]
    expected = (sum(losses) / 6).detach()
    with Pipeline(net, F.mse_loss, microbatches=3, ranks=2, reduction=len) as pipe:
        found = pipe.step(Microbatches(parts), Microbatches(targets)).loss
    torch.testing.assert_close(found, expected)


def test_a_mean_over_rows_needs_them():
    parts, targets = graphs()
    net, message = made(Pools, nn.Linear), r"reduction='mean' weighs.*function that returns the weight"
    with Pipeline(net, F.mse_loss, microbatches=3) as pipe, pytest.raises(BatchError, match=message):
        pipe.step(Microbatches(parts), Microbatches(targets))


def test_a_keyword_input_has_a_part_for_each_microbatch():
    x, positions = rows(ROWS, TIME, WIDTH), Microbatches([rows(3, 2, TIME)] * 4)
    net, message = made(Rotates, Rotates), "positions: 4 microbatches given, but there are 3"
    with Pipeline(net, F.mse_loss, microbatches=3) as pipe, pytest.raises(BatchError, match=message):
        pipe.step(x, x, positions=positions)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_of_given_parts_are_counted_along_the_given_dimensions(reduction: str):
    net = made(nn.Linear, nn.Linear)
    x, y = (rows(TIME, ROWS, WIDTH) + n for n in range(2))
    sizes = [1, 3, 2]
    losses = [F.mse_loss(net(a), b) for a, b in zip(x.split(sizes, 1), y.split(sizes, 1), strict=True)]
    expected = F.mse_loss(net(x), y) if reduction == "mean" else sum(losses)
    x, y = (Microbatches(value.split(sizes, 1)) for value in (x, y))
    with Pipeline(net, F.mse_loss, microbatches=3, dims={"x": 1, "y": -2}, reduction=reduction) as pipe:
        torch.testing.assert_close(pipe.step(x, y).loss, expected.detach())


def test_a_keyword_input_that_is_given_whole_may_be_given_for_each_microbatch():
    net = made(Rotates, Rotates)
    x, positions = rows(ROWS, TIME, WIDTH), [rows(3, 1, TIME) + n for n in range(3)]
    expected = sum(
        F.mse_loss(net[1](net[0](part, each), each), part) / 3
        for part, each in zip(x.chunk(3), positions, strict=True)
    )
    with Pipeline(net, F.mse_loss, microbatches=3, dims={"positions": None}) as pipe:
        found = pipe.step(x, x, positions=Microbatches(positions)).loss
    torch.testing.assert_close(found, expected.detach())


def test_a_scalar_target_has_no_rows():
    net = made(nn.Linear, nn.Linear)
    x, y = rows(3, WIDTH), rows(3)
    expected = sum((net(row).mean() - value) ** 2 for row, value in zip(x, y, strict=True))
    loss_fn = lambda out, target: (out.mean() - target) ** 2  # noqa: E731
    with Pipeline(net, loss_fn, microbatches=3, ranks=2, reduction="sum") as pipe:
        found = pipe.step(x, Microbatches(list(y))).loss
    torch.testing.assert_close(found, expected.detach())


class Autoencoder(nn.Module):
    """A model whose forward(x) returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in self.blocks:
            h = block(h).tanh()
        return F.mse_loss(h, x)


def energy(out: Tensor) -> Tensor:
    return out.square().mean()


class Energy(nn.Module):
    def forward(self, out: Tensor) -> Tensor:
        return energy(out)


def without_target(rank: int) -> list[Tensor]:
    x = rows(5, WIDTH)  # uneven microbatches
    found = []
    for make, loss_fn in ((Autoencoder, None), (lambda: made(nn.Linear, nn.Linear), energy)):
        torch.manual_seed(0)
        net = make()
        expected = (net(x) if loss_fn is None else loss_fn(net(x))).detach()
        with Pipeline(net, loss_fn, microbatches=2, ranks=2) as pipe:
            found += [expected, pipe.step(x).loss, pipe.evaluate(x).loss]
    return found


def test_losses_need_no_target(processes: LocalProcesses):
    for told in (without_target(0), *processes.run(2, without_target)):
        for expected, stepped, evaluated in (told[:3], told[3:]):
            torch.testing.assert_close(stepped, expected)
            torch.testing.assert_close(evaluated, expected)


def test_a_loss_module_of_the_output_alone():
    x, net = rows(ROWS, WIDTH), made(nn.Linear, nn.Linear)
    with Pipeline(net, Energy(), microbatches=2, ranks=2) as pipe:
        torch.testing.assert_close(pipe.step(x).loss, energy(net(x)).detach())
        with pytest.raises(BatchError, match="a target y was given, and the loss is of the output alone"):
            pipe.step(x, x)


@pytest.mark.parametrize("reduction", ["valid", len])
def test_a_reduction_that_counts_targets_needs_a_loss_with_one(reduction: Any):
    with pytest.raises(ConfigError, match="counts targets, and the loss takes none"):
        Pipeline(made(nn.Linear, nn.Linear), energy, microbatches=2, reduction=reduction)


def test_split_takes_a_forward_of_one_argument_that_returns_its_loss():
    torch.manual_seed(0)
    net = Autoencoder()
    layers = penstock.split(net, rows(ROWS, WIDTH), loss=True)
    with Pipeline(layers, microbatches=2, execution=ExecutionOptions(check_split=False)) as pipe:
        torch.testing.assert_close(pipe.step(rows(ROWS, WIDTH)).loss, net(rows(ROWS, WIDTH)).detach())
