"""A microbatch whose saved bytes are counted is checked like every other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline
from penstock.base.errors import StageError
from penstock.stage.compute.footprint import Footprint


class Spoils(nn.Module):
    """Writes into a tensor that the backward of its matrix product needs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        out = self.inner(h)
        h.mul_(2.0)
        return out + h


def test_what_was_saved_and_then_written_to_is_refused_while_it_is_counted():
    layer, x = Spoils(), torch.randn(3, 4)
    out = Footprint(layer).run(lambda: layer(x))
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* \(3, 4\) is at version 1"):
        out.sum().backward()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_only_microbatch_of_a_step_is_refused_as_plain_pytorch_refuses_it(schedule, recompute):
    net = nn.Sequential(Spoils(), nn.Linear(4, 4))
    with (
        Pipeline(net, F.mse_loss, microbatches=1, ranks=2, schedule=schedule, recompute=recompute) as pipe,
        pytest.raises(StageError, match="modified by an inplace operation"),
    ):
        pipe.step(torch.randn(3, 4), torch.randn(3, 4))
