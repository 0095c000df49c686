"""Layers whose use of weights the split backward does not see: detected on the first microbatch, and not split."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.base.errors import SplitBackwardError, StageError
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from tests.support import plain
from tests.support.lanes import exhaustive
from tests.zoo.case import KINDS

WIDTH, ROWS, M = 8, 8, 4


class Offloaded(nn.Module):
    """Sets hooks on the tensors that it saves for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return torch.tanh(self.inner(x))


class Unseen(nn.Module):
    """Uses a weight where no Python function sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            y = x @ self.inner.weight.t()
        return torch.tanh(self.inner(y))


# Kinds of the zoo, and two layers of its own.
LAYERS = {
    "checkpoint": KINDS["checkpoint"].build,
    "reentrant checkpoint": KINDS["checkpoint_reentrant"].build,
    "half in a checkpoint": KINDS["checkpoint_of_apart"].build,
    "hooks on saved tensors": Offloaded,
    "gradient penalty": KINDS["forces"].build,
    "torch.func.grad": KINDS["func_grad"].build,
    "vmap": KINDS["func_vmap"].build,
    "complex linear": KINDS["complex_linear"].build,
    "complex convolution": KINDS["complex_conv"].build,
    "hook on an output": KINDS["gradient_reversal"].build,
    "hook on a weight": KINDS["parameter_hook"].build,
    "attention": KINDS["multihead_attention"].build,
    "concatenated": KINDS["cat_and_linear"].build,
    "by keyword": KINDS["linear_and_keyword"].build,
    "own function": KINDS["own_function_and_linear"].build,
    "not seen from Python": Unseen,
}
FALL_BACK = ["gradient penalty", "not seen from Python"]


def make(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), LAYERS[kind](), LAYERS[kind](), nn.Linear(WIDTH, WIDTH))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS * M, WIDTH, generator=generator), torch.randn(
        ROWS * M, WIDTH, generator=generator
    )


def plainly(net: nn.Sequential, step: int) -> Tensor:
    return plain.step(net, F.mse_loss, *batch(step), M)[0]


# every layer where the backward is split; those that fall back on both ranks of zb-v; two where nothing is split
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        *((kind, "zb-h1") for kind in LAYERS),
        ("gradient penalty", "zb-v"),
        ("own function", "zb-v"),
        ("torch.func.grad", "1f1b"),
        ("not seen from Python", "1f1b"),
        *exhaustive(*((kind, schedule) for kind in LAYERS for schedule in ("1f1b", "zb-v"))),
    ],
)
def test_two_steps_give_the_bits_of_plain_pytorch(kind: str, schedule: str):
    net, other = make(kind), make(kind)
    optimizer, others = (torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, other))
    falls_back = kind in FALL_BACK and schedule != "1f1b"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Pipeline(net, F.mse_loss, microbatches=M, schedule=schedule, ranks=2) as pipe:
            for step in range(2):
                optimizer.zero_grad()
                others.zero_grad()
                result = pipe.step(*batch(step))
                assert torch.equal(result.losses, plainly(other, step))
                plain.require_equal_gradients(net, other)
                optimizer.step()
                others.step()
            info = pipe.trace().info
    texts = [str(w.message) for w in caught if "cannot be split" in str(w.message)]
    unsplit = info.get("whole_backward", [])
    assert len(texts) == len(unsplit)  # each is named once
    # The first stage of zb-h1 sends no gradients, so its backwards are not split.
    assert unsplit == ([] if not falls_back else ["2"] if schedule == "zb-h1" else ["1", "2"])


def test_a_transform_that_pytorch_does_not_recompute_is_refused_by_name():
    with (
        Pipeline(make("torch.func.grad"), F.mse_loss, microbatches=M, ranks=2, recompute="full") as pipe,
        pytest.raises(StageError, match=r"a layer calls torch\.func\.grad .* use recompute='none'"),
    ):
        pipe.step(*batch(0))


class ForwardMode(nn.Module):
    """Takes a forward-mode derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, along = torch.func.jvp(lambda z: torch.tanh(self.inner(z)), (x,), (torch.ones_like(x),))
        return y + along


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # torch's own, in torch.func.jvp
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_forward_mode_derivatives_are_refused_in_threads_and_right_in_one_rank(schedule: str):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), ForwardMode(), ForwardMode(), nn.Linear(WIDTH, WIDTH))
    with (
        Pipeline(net, F.mse_loss, microbatches=M, schedule=schedule, ranks=2) as pipe,
        pytest.raises(
            StageError, match=r"layer '[12]' takes forward-mode derivatives .* run one process per rank"
        ),
    ):
        pipe.step(*batch(0))
    net.zero_grad()
    other = copy.deepcopy(net)
    with Pipeline(net, F.mse_loss, microbatches=M, schedule=schedule, ranks=1) as pipe:
        pipe.step(*batch(0))
    plainly(other, 0)
    plain.require_equal_gradients(net, other)


class Writes(nn.Module):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).add_(1)


def test_a_forward_that_runs_again_without_hooks_begins_from_the_same_input():
    torch.manual_seed(0)
    net = nn.Sequential(Writes(), KINDS["func_grad"].build(), nn.Linear(WIDTH, WIDTH))
    other = copy.deepcopy(net)
    with Pipeline(net, F.mse_loss, microbatches=M, ranks=1) as pipe:
        losses = pipe.step(*batch(0)).losses
    parts = zip(*(part.chunk(M) for part in batch(0)), strict=True)
    assert torch.equal(losses, torch.stack([F.mse_loss(other(a), b).detach() for a, b in parts]))


def test_strict_refuses_by_name_what_would_fall_back():
    with (
        Pipeline(
            make("gradient penalty"),
            F.mse_loss,
            microbatches=M,
            schedule="zb-h1",
            ranks=2,
            execution=ExecutionOptions(strict=True),
        ) as pipe,
        pytest.raises(SplitBackwardError, match=r"stage \d: the backward of layer '[12]' cannot be split"),
    ):
        pipe.step(*batch(0))


class Changing(nn.Module):
    """Differentiates inside its forward from some microbatch on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.inner(x)
        if self.calls > M:
            y = y + torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]
        return y


def test_a_derivative_that_only_later_microbatches_take_is_refused_then_right():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Changing(), nn.Linear(WIDTH, WIDTH))
    # The layer would differentiate in the first step's comparison of rows, too.
    execution = ExecutionOptions(check_split=False)
    with Pipeline(net, F.mse_loss, microbatches=M, schedule="zb-h1", ranks=2, execution=execution) as pipe:
        pipe.step(*batch(0))
        with pytest.raises(Exception, match="computed gradients in its forward"):
            pipe.step(*batch(1))
        net.zero_grad()
        other = copy.deepcopy(net)
        pipe.step(*batch(2))
        plainly(other, 2)
        plain.require_equal_gradients(net, other)


def test_the_check_leaves_buffers_hooks_and_random_numbers_alone():
    calls = []

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)
        )
        net[0].register_forward_hook(lambda *_: calls.append(None))
        return net

    output = {}
    for schedule in ("1f1b", "zb-h1"):
        calls.clear()
        net = model()
        with Pipeline(net, F.mse_loss, microbatches=M, schedule=schedule, ranks=2) as pipe:
            pipe.step(*batch(0))
        output[schedule] = [
            *net.state_dict().values(),
            *(p.grad for p in net.parameters()),
            torch.tensor(len(calls)),
        ]
    assert all(torch.equal(a, b) for a, b in zip(*output.values(), strict=True))


def test_a_change_of_what_requires_a_gradient_is_checked_again():
    net = make("own function")
    with Pipeline(net, F.mse_loss, microbatches=M, schedule="zb-h1", ranks=2) as pipe:
        for step, frozen in enumerate((True, False, False)):
            net[0].requires_grad_(not frozen)
            net.zero_grad()
            other = copy.deepcopy(net)
            pipe.step(*batch(step))
            plainly(other, step)
            plain.require_equal_gradients(net, other)
