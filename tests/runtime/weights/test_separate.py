"""Modules that two ranks of one process share: each rank works on its own, and the gradients are one sum."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from penstock.base.errors import ConfigError, PenstockError, StageError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.compute.gradient_hooks import graph_nodes
from penstock.stage.compute.isolation import Isolation
from tests.support import plain
from tests.support.lanes import exhaustive

# The first layer of these small models has most of their parameters, which is said of models that train.
pytestmark = pytest.mark.filterwarnings("ignore:layer '0' has")
WIDTH, M = plain.WIDTH, 4


class Holder(nn.Module):
    """Has a part that others have, too, under a name of its own, twice."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.own, self.part, self.again = nn.Linear(WIDTH, WIDTH), part, part

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(x)) + self.again(torch.tanh(self.part(x)))


class Borrower(nn.Module):
    """Uses another layer's weight without owning it."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.hidden = [other]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.hidden[0].weight)


def sequence() -> nn.Sequential:
    a, b, shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(a, shared, b, shared)


def nested() -> nn.Sequential:
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    return nn.Sequential(Holder(part), nn.Linear(WIDTH, WIDTH), Holder(part), nn.Tanh())


def recurrent() -> nn.Sequential:
    class Recurrent(nn.Module):
        def __init__(self, cell: nn.Module) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.cell(x[:, None])
            return y[:, 0]

    cell = nn.GRU(WIDTH, WIDTH, batch_first=True)
    return nn.Sequential(Recurrent(cell), nn.Linear(WIDTH, WIDTH), Recurrent(cell), nn.Linear(WIDTH, WIDTH))


MODELS = {"sequence": sequence, "nested": nested, "recurrent": recurrent}


def make(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return MODELS[kind]()


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    return plain.batch(step, 2 * M)


def alone(net: nn.Module, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(plain.step(net, F.mse_loss, *batch(step), M)[0])
        optimizer.step()
    return torch.cat(losses), {n: p.grad.clone() for n, p in net.named_parameters()}


def pipelined(rank: int, kind: str, schedule: str, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    net = make(kind)
    with Pipeline(net, F.mse_loss, microbatches=M, schedule=schedule, ranks=2) as pipe:
        optimizer, losses = torch.optim.SGD(pipe.parameters(), lr=0.1), []
        for step in range(steps):
            optimizer.zero_grad()
            losses.append(pipe.step(*batch(step)).losses)
            optimizer.step()
        return torch.cat(losses), {n: p.grad.clone() for n, p in pipe.named_parameters()}


def assert_close(found, wanted) -> None:
    """A gradient that two ranks contribute to is a sum in another order than plain PyTorch's."""
    (losses, grads), (plain_losses, plain_grads) = found, wanted
    torch.testing.assert_close(losses, plain_losses, rtol=1e-6, atol=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(
            grad, plain_grads[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("sequence", "1f1b"),
        ("nested", "zb-v"),
        ("recurrent", "dualpipe"),
        *exhaustive(("nested", "gpipe"), ("sequence", "zb-h1"), ("recurrent", "zb-v"), ("nested", "chimera")),
    ],
)
def test_threads_train_a_module_that_two_ranks_use(kind: str, schedule: str):
    found = pipelined(0, kind, schedule, 2)
    again = pipelined(0, kind, schedule, 2)
    assert_close(found, alone(make(kind), 2))
    assert torch.equal(found[0], again[0])
    assert all(torch.equal(grad, again[1][name]) for name, grad in found[1].items())


@pytest.mark.slow
def test_processes_give_the_bits_of_threads(processes: LocalProcesses):
    (losses, grads), (_, more) = processes.run(2, pipelined, "nested", "1f1b", 2)
    ours, own = pipelined(0, "nested", "1f1b", 2)
    assert torch.equal(losses, ours)
    assert all(torch.equal(g, own[n]) for n, g in {**grads, **more}.items() if n in own)


def test_a_parameter_used_without_owning_it_is_refused_by_name():
    torch.manual_seed(0)
    inner = nn.Linear(WIDTH, WIDTH)
    net = nn.Sequential(inner, nn.Tanh(), Borrower(inner), nn.Linear(WIDTH, WIDTH))
    with (
        Pipeline(net, F.mse_loss, microbatches=M, schedule="1f1b", ranks=2) as pipe,
        pytest.raises(
            StageError, match=r"uses the parameter 0\.weight of another stage without owning it; register"
        ),
    ):
        pipe.step(*batch())
    with Pipeline(net, F.mse_loss, microbatches=M, schedule="1f1b", ranks=1) as pipe:
        pipe.step(*batch())  # within one stage there is nothing wrong with it


def test_a_parameter_that_is_gone_is_not_taken_for_another_at_its_address():
    other, leaf = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    Isolation({id(leaf): (other, "weight", "0.weight")}).require_own_leaves(graph_nodes([leaf.sum().grad_fn]))
    with pytest.raises(PenstockError, match=r"uses the parameter 0\.weight"):
        Isolation({id(other.weight): (other, "weight", "0.weight")}).require_own_leaves(
            graph_nodes([other.weight.sum().grad_fn])
        )


def test_stages_keep_no_weak_references_to_parameters():
    """With one, torch cannot put a parameter on the meta device as the object that it is."""
    net = nested()
    with Pipeline(net, F.mse_loss, microbatches=M, schedule="1f1b", ranks=2):
        assert all(weakref.getweakrefcount(p) == 0 for p in net.parameters())


@pytest.mark.parametrize(
    ("of_a_layer", "schedule", "virtual_stages"),
    [(False, "1f1b", 1), (True, "1f1b", 1), (False, "round-trip", 2)],
)
def test_a_changing_buffer_of_a_module_that_two_ranks_use_is_refused_by_name(
    of_a_layer: bool, schedule: str, virtual_stages: int
):
    norm = nn.BatchNorm1d(WIDTH)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), norm)
    if of_a_layer:
        net = nn.Sequential(Holder(norm), nn.Linear(WIDTH, WIDTH), Holder(norm), nn.Tanh())
    with Pipeline(
        net, F.mse_loss, microbatches=M, schedule=schedule, ranks=2, virtual_stages=virtual_stages
    ) as pipe:
        with pytest.raises(
            StageError,
            match=r"changes buffer [\d.a-z]+\.running_mean, whose module is used at several places",
        ):
            pipe.step(*batch())
        pipe.eval()
        pipe.step(*batch())


def test_a_module_that_cannot_be_copied_is_refused_by_name():
    part = nn.Linear(WIDTH, WIDTH)
    part.lock = threading.Lock()
    net = nn.Sequential(part, nn.Tanh(), part, nn.Tanh())
    with pytest.raises(ConfigError, match=r"a Linear needs copies .* and cannot be copied"):
        Pipeline(net, F.mse_loss, microbatches=M, ranks=2)


def test_weights_that_a_hook_computes_before_each_forward_are_copied():
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    prune.l1_unstructured(net[1], "weight", 0.5)
    net(batch()[0])  # leaves a tensor with a graph behind
    reference = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    prune.identity(reference[1], "weight")
    reference.load_state_dict(net.state_dict())
    with Pipeline(net, F.mse_loss, microbatches=M, schedule="dualpipe", ranks=2) as pipe:
        pipe.step(*batch())
    _, wanted = alone(reference, 1)
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-5, atol=1e-7)


def test_a_hook_after_accumulation_is_refused_on_copies():
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    net[1].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(
        ConfigError, match=r"1\.weight has a hook that runs after its gradient was accumulated"
    ):
        Pipeline(net, F.mse_loss, microbatches=M, schedule="dualpipe", ranks=2)
