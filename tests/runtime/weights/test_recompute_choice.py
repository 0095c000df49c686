"""What a step held is gone after it, and what is handed over is gone when the Program says so."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from penstock.runtime.pipeline import Pipeline
from tests.support import plain


class Watch(nn.Module):
    """Keeps weak references to everything that goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        self.seen += [weakref.ref(x), weakref.ref(y)]
        return y


@pytest.mark.parametrize("family", ["1f1b", "zb-v", "chimera"])
def test_no_tensor_of_a_step_is_alive_after_it(family):
    net = plain.model(4)
    watches = [Watch() for _ in range(4)]
    for layer, watch in zip(net, watches, strict=True):
        layer.append(watch)
    with Pipeline(net, nn.functional.mse_loss, microbatches=4, ranks=2, schedule=family) as pipe:
        result = pipe.step(*plain.batch(0, 8), outputs=True)
        assert sum(stage.held for stage in pipe.stages.values()) == 0
        del result
        gc.collect()
        assert [ref for watch in watches for ref in watch.seen if ref() is not None] == []


class Holder(nn.Module):
    """At its n-th forward says how many earlier outputs are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        self.alive.append(sum(ref() is not None for ref in self.outputs))
        y = x + 1.0
        self.outputs.append(weakref.ref(y))
        return y


def outputs_alive_at_the_sender(rank: int) -> list[int]:
    net = plain.model(2)
    holder = Holder()
    net[0].append(holder)
    with Pipeline(net, nn.functional.mse_loss, microbatches=4, schedule="gpipe", ranks=2) as pipe:
        pipe.step(*plain.batch(0, 8))
    return holder.alive


def test_a_sent_output_does_not_live_until_its_backward(processes):
    # GPipe's backwards all come after the last forward, so without release it would be 0, 1, 2, 3.
    assert max(processes.run(2, outputs_alive_at_the_sender)[0]) <= 1
