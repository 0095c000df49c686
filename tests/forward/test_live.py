"""Layers of a model have its modes and attributes: what changes after the split counts as in PyTorch, or is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import changing_models, own_models
from tests.support.changing_models import Changing, Criterion, change
from tests.support.lanes import exhaustive, slow

LAYOUTS = {
    "one rank": {"ranks": 1},
    "three ranks": {"ranks": 3},
    "recompute": {"ranks": 2, "recompute": "full"},
    "stages on two ranks": {"ranks": 2, "schedule": "dualpipe"},
}


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    yield
    changing_models.restore()


def losses(net: nn.Module, x: Tensor, y: Tensor, count: int) -> Tensor:
    return torch.stack([net(a, b).detach() for a, b in zip(x.chunk(count), y.chunk(count), strict=True)])


def pipeline(net: nn.Module, layout: dict[str, object], loss_fn: object = None) -> penstock.Pipeline:
    return penstock.Pipeline(net, loss_fn, microbatches=4, **layout)


def compare(statement: str, layout: dict[str, object]) -> None:
    """Compare three steps and an evaluation, with a change after the first step, with the plain model."""
    net = own_models.made(Changing)
    expected = copy.deepcopy(net)
    x, y = own_models.batch(8)
    with pipeline(net, layout) as pipe:
        assert torch.equal(pipe.step(x, y).losses, losses(expected, x, y, 4))
        change(net, statement)
        change(expected, statement)
        for _ in range(2):
            assert torch.allclose(pipe.step(x, y).losses, losses(expected, x, y, 4), rtol=1e-6)
        modes = [m.training for m in net.modules()]
        assert modes == [m.training for m in expected.modules()]
        copied = copy.deepcopy(expected).eval()
        with torch.no_grad():
            # Statistics of copies are joined after a step, so they are the pipeline's.
            copied.load_state_dict(pipe.full_state_dict())
            assert torch.allclose(pipe.evaluate(x, y).losses, losses(copied, x, y, 4), rtol=1e-6)
        assert [m.training for m in net.modules()] == modes


# each change in one layout
@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("the whole model", "recompute"),
        ("its stem", "three ranks"),
        ("a backbone", "one rank"),
        ("a norm", "stages on two ranks"),
        ("its own flag alone", "three ranks"),
        *exhaustive(*itertools.product(changing_models.MODES, LAYOUTS)),
    ],
)
def test_every_layout_follows_the_model(mode: str, layout: str):
    compare(changing_models.MODES[mode], LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout", ["stages on two ranks", *exhaustive("one rank", "three ranks", "recompute")]
)
def test_values_of_attributes_count_from_the_next_step_on(layout: str):
    net = own_models.made(Changing)
    expected = copy.deepcopy(net)
    x, y = own_models.batch(8)
    before = losses(expected, x, y, 4)
    with pipeline(net, LAYOUTS[layout]) as pipe:
        assert torch.equal(pipe.step(x, y).losses, before)
        for statement in changing_models.VALUES:
            change(net, statement)
            change(expected, statement)
            wanted = losses(expected, x, y, 4)
            assert not torch.equal(wanted, before), statement
            assert torch.allclose(pipe.step(x, y).losses, wanted, rtol=1e-6), statement
            before = wanted


def after_changes(rank: int, statements: list[str]) -> str:
    for statement in statements:
        net = own_models.made(Changing)
        expected = copy.deepcopy(net)
        x, y = own_models.batch(8)
        with penstock.Pipeline(net, microbatches=4) as pipe:
            pipe.step(x, y)
            losses(expected, x, y, 4)
            change(net, statement)
            change(expected, statement)
            seen, wanted = pipe.step(x, y).losses, losses(expected, x, y, 4)
            changing_models.restore()
            if not torch.allclose(seen, wanted, rtol=1e-6):
                return f"{statement}: {seen} for {wanted}"
            pipe.train()
            pipe.eval()
            expected.train()
            expected.eval()
            if not torch.equal(pipe.step(x, y).losses, losses(expected, x, y, 4)):
                return f"{statement}: pipe.eval()"
    return ""


CHANGES = [*changing_models.MODES.values(), *changing_models.VALUES]


@pytest.mark.parametrize("statements", [*slow(CHANGES[::4]), *exhaustive(CHANGES)], ids=["some", "all"])
def test_processes_follow_their_models(processes: LocalProcesses, statements: list[str]):
    assert processes.run(2, after_changes, statements) == ["", ""]


def test_the_mode_of_a_pipeline_is_that_of_its_model():
    net = own_models.made(Changing)
    x, y = own_models.batch()
    with penstock.Pipeline(net, ranks=2, microbatches=2) as pipe:
        assert pipe.eval() is pipe
        assert not any(m.training for m in net.modules())
        expected = losses(copy.deepcopy(net), x, y, 2)
        assert torch.equal(pipe.step(x, y).losses, expected)
        assert torch.equal(pipe.evaluate(x, y).losses, expected)
        pipe.train()
        assert all(m.training for m in net.modules())
        net.backbone.eval()
        pipe.evaluate(x, y)
        assert [net.training, net.backbone.training, net.backbone.blocks.training] == [True, False, False]
        assert all(m.training for m in net.stem.modules())


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def bound(criterion: Criterion) -> object:
    return criterion.forward


def in_a_partial(criterion: Criterion) -> object:
    return partial(lambda criterion, output, target: criterion(output, target), criterion)


def in_a_closure(criterion: Criterion) -> object:
    return lambda output, target: criterion(output, target)


def alone(criterion: Criterion) -> object:
    return criterion


# in one copy of the last stage, and in two
@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        (alone, "dualpipe"),
        (bound, "dualpipe"),
        (in_a_partial, "1f1b"),
        (in_a_closure, "1f1b"),
        *exhaustive((alone, "1f1b"), (bound, "1f1b"), (in_a_partial, "dualpipe"), (in_a_closure, "dualpipe")),
    ],
)
def test_a_criterion_is_in_evaluation_while_the_pipeline_evaluates(given, schedule: str):
    net, criterion = own_models.made(own_models.Methods), Criterion()
    x, y = own_models.batch()
    with penstock.Pipeline(net, given(criterion), ranks=2, microbatches=2, schedule=schedule) as pipe:
        trained = pipe.step(x, y).losses
        seen = pipe.evaluate(x, y).losses
        assert all(m.training for m in criterion.modules())
        criterion.eval()
        pipe.evaluate(x, y)
        assert not any(m.training for m in criterion.modules())
    outputs = [(net.eval()(a), b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    assert torch.equal(seen, torch.stack([criterion(a, b) for a, b in outputs]))
    assert not torch.allclose(trained, seen)


class Norms(nn.Module):
    """A stack of two kinds of modules whose buffers or inputs training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(own_models.WIDTH, own_models.WIDTH)
        self.norm = nn.BatchNorm1d(own_models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def test_a_module_that_is_put_into_training_later_updates_its_buffers_once():
    torch.manual_seed(0)
    net = nn.Sequential(*[Norms() for _ in range(4)])
    for layer in net:
        layer.norm.eval()
    expected = copy.deepcopy(net)
    x = torch.randn(8, own_models.WIDTH)
    with penstock.Pipeline(net, mean_square, ranks=2, microbatches=2, recompute="full") as pipe:
        for _ in range(2):
            pipe.step(x, x)
            for part in x.chunk(2):
                expected(part)
            for model in (net, expected):
                for layer in model:
                    layer.norm.train()
        for name, buffer in expected.named_buffers():
            assert torch.equal(net.get_buffer(name), buffer), name


class WritesInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(own_models.WIDTH, own_models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x if self.training else x.mul_(2))


def test_a_layer_that_writes_into_its_input_in_evaluation_alone_gets_a_copy_there():
    torch.manual_seed(0)
    net = nn.Sequential(*[WritesInEvaluation() for _ in range(4)])
    x, y = torch.randn(2, 8, own_models.WIDTH)
    with penstock.Pipeline(net, mean_square, ranks=4, microbatches=2) as pipe:
        for _ in range(3):
            pipe.step(x, y)
        net.eval()
        seen = pipe.step(x, y).losses
    expected = torch.stack([mean_square(net(part.clone()), part) for part in x.chunk(2)])
    assert torch.equal(seen, expected)


class Monte(nn.Module):
    """Its dropout may train while the layer does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(own_models.WIDTH, own_models.WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.inner(x))


def drawing_loss(criterion: Criterion, output: Tensor, target: Tensor) -> Tensor:
    return criterion(output[..., None].expand(-1, -1, own_models.VOCABULARY) * 1.0, target.long())


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_numbers_do_not_depend_on_an_evaluation_before(ranks: int):
    x = torch.randn(8, own_models.WIDTH, generator=torch.Generator().manual_seed(1))
    y = torch.zeros(8, own_models.WIDTH)
    seen = []
    for first in (False, True):
        torch.manual_seed(0)
        net, criterion = nn.Sequential(*[Monte() for _ in range(4)]), Criterion()
        net.eval()
        for layer in net:
            layer.dropout.train()
        loss_fn = partial(drawing_loss, criterion)
        with penstock.Pipeline(net, lambda o, t, f=loss_fn: f(o, t), ranks=ranks, microbatches=2) as pipe:
            if first:
                pipe.evaluate(x, y)
            torch.manual_seed(len(seen))  # of the default generator, which nothing draws from
            seen.append(pipe.step(x, y).losses)
    assert torch.equal(*seen)
