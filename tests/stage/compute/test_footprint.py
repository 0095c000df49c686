"""A microbatch whose saved bytes are counted is checked like every other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import ExecutionOptions, Pipeline
from penstock.base.errors import StageError
from penstock.stage.compute.footprint import Footprint
from tests.zoo.case import KINDS
from tests.zoo.kind import WIDTH

spoils = KINDS["spoils_what_is_saved"].build


def test_what_was_saved_and_then_written_to_is_refused_while_it_is_counted():
    layer, x = spoils(), torch.randn(3, WIDTH)
    out = Footprint(layer).run(lambda: layer(x))
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* \(3, 8\) is at version 1"):
        out.sum().backward()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_only_microbatch_of_a_step_is_refused_as_plain_pytorch_refuses_it(schedule, recompute):
    net = nn.Sequential(spoils(), nn.Linear(WIDTH, WIDTH))
    with (
        Pipeline(net, F.mse_loss, microbatches=1, ranks=2, schedule=schedule, recompute=recompute) as pipe,
        pytest.raises(StageError, match="modified by an inplace operation"),
    ):
        pipe.step(torch.randn(3, WIDTH), torch.randn(3, WIDTH))


def held(net: list[nn.Module], x: Tensor, y: Tensor, microbatches: int, **options: object) -> list[int]:
    """Return the most bytes that each rank held in the last of two steps."""
    with Pipeline(net, F.mse_loss, microbatches=microbatches, ranks=len(net), **options) as pipe:
        for _ in range(2):
            pipe.step(x, y)
        trace = pipe.trace()
    return [int(trace.held[trace.rank == rank].max()) for rank in range(len(net))]


def images() -> tuple[list[nn.Module], Tensor, Tensor]:
    """Return layers that keep little but their images, and a batch of 8."""
    net = [nn.Sequential(nn.Conv2d(3, 1, 8, stride=8), nn.Flatten()), nn.Linear(16, 1)]
    return net, torch.randn(8, 3, 32, 32), torch.randn(8, 1)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_of_a_batch_whose_microbatches_are_views_each_holds_its_own_bytes(schedule):
    net, x, y = images()
    for microbatches, in_flight in ((1, 1), (8, 8 if schedule == "gpipe" else 2)):
        peak = held(net, x, y, microbatches, schedule=schedule)[0]
        assert 0 <= peak - in_flight * x.nbytes // microbatches < x.nbytes // 8


def test_where_input_and_target_overlap_each_byte_counts_once():
    tokens = torch.randn(8, 9)
    (peak,) = held([nn.Linear(8, 8, bias=False)], tokens[:, :-1], tokens[:, 1:], 4, schedule="1f1b")
    assert (
        peak == tokens[:2].nbytes + tokens[:2, 1:].nbytes
    )  # the views overlap, and the loss keeps the output


def test_a_microbatch_cut_along_another_dimension_holds_its_elements_only():
    x = torch.randn(16, 8, 4)
    footprint = Footprint(nn.Identity(), [x])
    assert footprint.of([x[:, :2], x[:, :2].transpose(0, 1)]) == x[:, :2].nbytes
    assert footprint.of([x[:, :4]]) <= x.nbytes


def test_a_budget_that_images_fit_into_is_not_refused():
    net, x, y = images()
    limit = 3 * x.nbytes // 8
    options = {"recompute": "auto", "execution": ExecutionOptions(memory=limit), "schedule": "1f1b"}
    assert max(held(net, x, y, 8, **options)) <= limit
