"""Buffers of one copy of a stage: which a step has changed, and how values are written into them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.runtime.copies.buffers import _StageCopy
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule


class Counts(nn.Module):
    """Has a buffer that its forward adds to, one that it leaves alone, and one that no state has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("still", torch.ones(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        self.scratch.add_(1)
        return x


@pytest.fixture
def layer() -> Counts:
    return Counts()


@pytest.fixture
def copy(layer: Counts) -> _StageCopy:
    return _StageCopy(StageModule([Layer("0", lambda: layer)]))


@pytest.mark.parametrize("name", ["seen", "scratch"])
def test_values_of_the_same_kind_are_written_into_the_buffer_itself(layer: Counts, copy: _StageCopy, name):
    before, value = layer.get_buffer(name), torch.full((2,), 3.0)
    copy.write({f"0.{name}": value})
    assert layer.get_buffer(name) is before
    assert before.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("value", [torch.full((3,), 3.0), torch.full((2,), 3.0, dtype=torch.float64)])
def test_values_of_another_shape_or_dtype_take_the_buffers_place(layer: Counts, copy: _StageCopy, value):
    before = layer.seen
    copy.write({"0.seen": value})
    assert layer.seen is not before
    assert layer.seen is not value  # which another copy may get, too
    assert layer.seen.dtype == value.dtype
    assert torch.equal(layer.seen, value)
    assert before.tolist() == [0.0, 0.0]


def test_what_a_step_wrote_has_changed_and_later_steps_watch_that_alone(layer: Counts, copy: _StageCopy):
    copy.begin()
    assert sorted(copy.before) == ["0.seen", "0.still"]
    layer(torch.zeros(1))
    assert {name: value.tolist() for name, value in copy.changed().items()}["0.seen"] == [1.0, 1.0]
    copy.begin()
    assert list(copy.before) == ["0.seen"]
    layer.still.mul_(2)
    assert sorted(copy.changed()) == ["0.seen", "0.still"]


def test_writes_between_steps_are_seen_in_scratch_too(layer: Counts, copy: _StageCopy):
    copy.record()
    copy.record_scratch()
    assert copy.written() == {}
    layer.scratch.fill_(5.0)
    layer.still.fill_(6.0)
    assert sorted(copy.written()) == ["0.scratch", "0.still"]
