"""What the user changes on modules between two steps holds for their copies in other threads, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.base.errors import PenstockError, ReplicaError
from penstock.runtime.pipeline import Pipeline
from tests.support import plain
from tests.support.lanes import exhaustive

WIDTH, M = plain.WIDTH, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.0)
        self.scale, self.function = 1.0, torch.sin
        self.config = SimpleNamespace(scale=1.0, inner=SimpleNamespace(scale=1.0))
        self.options, self.sizes = {"scale": 1.0}, [1.0, 2]

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale if self.training else 0.5 * self.scale
        scale = scale * self.config.inner.scale * self.options["scale"] * self.sizes[0]
        return self.dropout(self.act(self.function(self.linear(x)) * scale))


def make(layers: int = 4, shared: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(layers)]
    return nn.Sequential(blocks[0], blocks[1], blocks[2], blocks[0] if shared else blocks[3])


BATCH = plain.batch(1, 8)


def losses(net: nn.Module) -> Tensor:
    return plain.step(net, F.mse_loss, *BATCH, M)[0]


def pipeline(net: nn.Module, schedule: str) -> Pipeline:
    return Pipeline(net, F.mse_loss, microbatches=M, schedule=schedule, ranks=2)


def set_scale(net: nn.Sequential) -> None:
    net[0].scale, net[1].scale = 2.0, 3.0


def set_field(net: nn.Sequential) -> None:
    net[0].config.inner.scale = 2.0


def set_entry(net: nn.Sequential) -> None:
    net[0].options["scale"] = 2.0


def set_item(net: nn.Sequential) -> None:
    net[0].sizes[0] = 2.0


def set_function(net: nn.Sequential) -> None:
    net[0].function, net[2].function = torch.cos, F.relu


FOLLOWED: dict[str, Callable[[nn.Sequential], object]] = {
    "eval": lambda net: net.eval(),
    "one in eval": lambda net: net[0].eval(),
    "attribute": set_scale,
    "function": set_function,
    "field of a config": set_field,
    "entry of a dict": set_entry,
    "item of a list": set_item,
}


@pytest.mark.parametrize(
    ("schedule", "shared", "change"),
    [
        *(("dualpipe", False, change) for change in FOLLOWED),
        ("1f1b", True, "attribute"),
        ("1f1b", True, "one in eval"),
        *exhaustive(*(("chimera", False, change) for change in FOLLOWED)),
    ],
)
def test_copies_follow_modes_and_attributes(schedule: str, shared: bool, change: str):
    net = make(shared=shared)
    reference = copy.deepcopy(net)
    with pipeline(net, schedule) as pipe:
        for _ in range(2):
            torch.testing.assert_close(pipe.step(*BATCH).losses, losses(reference))
            FOLLOWED[change](net)
            FOLLOWED[change](reference)
            pipe.evaluate(*BATCH)
            assert [m.training for m in net.modules()] == [m.training for m in reference.modules()]
        torch.testing.assert_close(pipe.step(*BATCH).losses, losses(reference))
    plain.require_equal_gradients(net, reference, exactly=False)


def patched(net: nn.Sequential) -> None:
    net[0].forward = lambda x: x


REFUSED: dict[str, Callable[[nn.Sequential], object]] = {
    "activation": lambda net: setattr(net[0], "act", nn.ReLU()),
    "layer": lambda net: setattr(net[0], "linear", nn.Linear(WIDTH, WIDTH)),
    "another layer": lambda net: net[0].add_module("more", nn.Linear(WIDTH, WIDTH)),
    "weight": lambda net: setattr(net[0].linear, "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))),
    "bias": lambda net: setattr(net[0].linear, "bias", None),
    "buffer": lambda net: net[0].register_buffer("more", torch.zeros(1)),
    "assign": lambda net: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True),
    "forward hook": lambda net: net[0].linear.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda net: net[0].linear.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda net: net[0].linear.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda net: net[0].linear.register_full_backward_pre_hook(lambda *_: None),
    "forward": patched,
    "class": lambda net: setattr(net[0], "__class__", type("Other", (Block,), {})),
    "weight_norm": lambda net: nn.utils.parametrizations.weight_norm(net[0].linear),
}


@pytest.mark.parametrize(
    ("schedule", "shared", "change"),
    [
        *(("dualpipe", False, change) for change in REFUSED),
        ("1f1b", True, "activation"),
        ("1f1b", True, "forward hook"),
        *exhaustive(*(("1f1b", True, change) for change in REFUSED)),
    ],
)
def test_changes_that_copies_cannot_follow_are_refused_by_name(schedule: str, shared: bool, change: str):
    net = make(shared=shared)
    with pipeline(net, schedule) as pipe:
        pipe.step(*BATCH)
        REFUSED[change](net)
        for run in (pipe.step, pipe.step, pipe.evaluate):
            with pytest.raises(ReplicaError, match=r"0.*pipeline was built"):
                run(*BATCH)
        assert pipe.steps == 1


def test_a_change_that_was_undone_is_no_change():
    net = make()
    with pipeline(net, "dualpipe") as pipe:
        handle = net[0].register_forward_hook(lambda *_: None)
        with pytest.raises(PenstockError, match=r"module '0' \(Block\) has another _forward_hooks than when"):
            pipe.step(*BATCH)
        handle.remove()
        torch.testing.assert_close(pipe.step(*BATCH).losses, losses(make()))
