"""Layers that write into their inputs train as in plain PyTorch, wherever the model is split."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.base.errors import StageError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.compute.inplace import clone_with_strides
from tests.support import plain
from tests.support.lanes import exhaustive

WIDTH = plain.WIDTH


class Writes(nn.Module):
    """Begins with an in-place operation, then calls a linear layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.how:
            case "add_":
                x.add_(1)
            case "relu_":
                x.relu_()
            case "functional":
                F.relu(x, inplace=True)
            case "index":
                x[:, 0] = 0
            case "view":
                x.view(-1).mul_(2)
            case "late":
                scale = self.norm(torch.ones_like(x))
                x += scale
        return self.inner(x)


# into the input, into a view of it, and only behind a normalisation, whose buffers count how often it ran
HOWS = ["add_", "view", "late", *exhaustive("relu_", "functional", "index")]


class Both(nn.Module):
    """Writes into one of two values of a nested output."""

    def forward(self, value: dict[str, torch.Tensor]) -> torch.Tensor:
        value["b"].sub_(1)
        return value["a"] * value["b"]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.inner(x), "b": self.inner(x) * 2}


def model(how: str, frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Writes(how) for _ in range(3)))
    net[:2].requires_grad_(not frozen)
    return net


def steps(net: nn.Sequential, ranks: int, **options: object) -> list[torch.Tensor]:
    """Return the losses of two steps, the evaluation's loss, buffers and gradients."""
    actual = []
    with Pipeline(net, F.mse_loss, microbatches=4, ranks=ranks, timeout=300, **options) as pipe:
        for n in range(2):
            x, y = plain.batch(n, 8)
            actual.append(pipe.step(x, y).losses)
            assert torch.equal(x, plain.batch(n, 8)[0])  # the batch stays as it was
        actual.append(pipe.evaluate(*plain.batch(0, 8)).losses)
        actual += [b.clone() for _, b in sorted(pipe.state_dict().items())]
        actual += [p.grad for p in pipe.parameters() if p.grad is not None]
    return actual


def expected(net: nn.Sequential) -> list[torch.Tensor]:
    actual = [plain.step(_with_copy(net), F.mse_loss, *plain.batch(n, 8), 4)[0] for n in range(2)]
    net.eval()
    with torch.no_grad():
        x, y = plain.batch(0, 8)
        pairs = zip(x.chunk(4), y.chunk(4), strict=True)
        actual.append(torch.stack([F.mse_loss(net(a.clone()), b) for a, b in pairs]))
    actual += [b for _, b in sorted(net.state_dict().items())]
    return actual + [p.grad for p in net.parameters() if p.grad is not None]


def _with_copy(net: nn.Sequential) -> nn.Module:
    """`plain.step` gives leaves, into which not even plain PyTorch writes."""

    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x.clone())

    return Copied()


def same(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(actual) == len(wanted) and all(map(torch.equal, actual, wanted))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        ("1f1b", "none"),
        ("zb-h1", 2),
        *exhaustive(("1f1b", "full"), ("1f1b", 2), ("zb-h1", "none"), ("zb-h1", "full")),
    ],
)
def test_a_layer_that_begins_in_place_trains_as_in_plain_pytorch(how, family, recompute):
    wanted = expected(model(how))
    for ranks in (2, 4):
        assert same(steps(model(how), ranks, schedule=family, recompute=recompute), wanted)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("recompute", ["full", *exhaustive("none")])
def test_inputs_that_need_no_gradient_are_recomputed_from_what_they_were(how, recompute):
    wanted = expected(model(how, frozen=True))
    assert same(steps(model(how, frozen=True), 4, recompute=recompute), wanted)


def in_process(rank: int, how: str) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    return steps(model(how), 4, recompute=2)[:2]


@pytest.mark.slow
def test_in_processes_as_well(processes: LocalProcesses):
    wanted = expected(model("late"))[:2]
    assert all(same(actual, wanted) for actual in processes.run(4, in_process, "late"))


def test_a_first_layer_that_writes_leaves_the_batch_alone():
    nets = [nn.Sequential(Writes("add_"), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    assert same(steps(nets[0], 2), expected(nets[1]))


def test_one_of_several_values_may_be_written_to():
    actual = []
    for split in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(Pair(), Both())
        x, y = plain.batch(0, 8)
        if split:
            with Pipeline(net, F.mse_loss, microbatches=4, ranks=2) as pipe:
                losses = pipe.step(x, y).losses
        else:
            losses = plain.step(net, F.mse_loss, x, y, 4)[0]
        actual.append([losses, *(p.grad for p in net.parameters())])
    assert same(*actual)


class Sometimes(nn.Module):
    """Writes into its input, but not the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            x.mul_(2)
        return self.inner(x)


@pytest.mark.parametrize(("frozen", "recompute"), [(False, "none"), (False, "full"), (True, "full")])
def test_a_layer_that_begins_to_write_later_is_refused_once_with_what_to_do(frozen, recompute):
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen), Sometimes())
    with Pipeline(net, F.mse_loss, microbatches=2, ranks=2, recompute=recompute) as pipe:
        with pytest.raises(StageError) as caught:
            pipe.step(*plain.batch(0, 4))
        cause = caught.value.__cause__
        assert "begin with x = x.clone()" in " ".join([str(cause), *getattr(cause, "__notes__", [])])
        pipe.step(*plain.batch(0, 4))


def test_what_is_held_is_counted_without_the_copies_of_the_first_microbatch():
    held = []
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        with Pipeline(net, F.mse_loss, microbatches=1, ranks=2, recompute=recompute) as pipe:
            pipe.step(*plain.batch(0, 2))
            trace = pipe.trace()
            held.append([int(trace.held[trace.rank == rank].max()) for rank in range(2)])
    row = 2 * WIDTH * 4
    assert held == [[row, 3 * row], [row, row]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6),
        torch.randn(6, 4).t(),
        torch.randn(4, 12)[:, ::2],
        torch.randn(4, 12)[:, :6],
        torch.randn(1, 6).expand(4, 6),
        torch.arange(24).view(4, 6),
        torch.randn(4, 6).to_sparse(),
    ],
)
def test_a_copy_has_the_strides_and_hands_back_the_gradient(tensor):
    leaf = tensor.requires_grad_() if tensor.is_floating_point() else tensor
    copy = clone_with_strides(leaf)
    if tensor.layout is torch.strided:
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)
    if leaf.requires_grad and tensor.layout is torch.strided:
        (copy * 3).sum().backward()
        assert torch.equal(leaf.grad, torch.full((4, 6), 3.0))
