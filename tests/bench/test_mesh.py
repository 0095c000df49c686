"""The quick part of bench.mesh, on more processes than other tests have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from bench.mesh import MESHES, deviation

from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.tied import batch, loss_fn, model

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def eight() -> Iterator[LocalProcesses]:
    with LocalProcesses(8) as pool:
        yield pool


def test_two_ranks_on_each_axis_are_one_process_to_summation_order(eight: LocalProcesses):
    found = deviation(eight, MESHES[-1], "zb-v", 2)
    assert found["same bits"]
    assert max(found["losses"], found["gradients"], found["weights"]) < 5e-6


def tied(rank: int, zero: bool) -> torch.Tensor:
    with Pipeline(model(), loss_fn, microbatches=2, mesh=MeshShape(2, 3, 1), timeout=300) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, clip=0.5, zero=zero)
        for n in range(3):
            pipe.step(*(torch.cat(parts) for parts in zip(batch(n), batch(n + 9), strict=True)))
            optimizer.step()
        return next(p.detach().clone() for name, p in pipe.named_parameters() if name == "0.weight")


@pytest.mark.parametrize("zero", [False, True])
def test_copies_of_a_tied_weight_have_the_same_bits_however_many_replicas_add_up(
    eight: LocalProcesses, zero: bool
):
    first, *others = eight.run(6, tied, zero)
    assert all(torch.equal(first, other) for other in others)
