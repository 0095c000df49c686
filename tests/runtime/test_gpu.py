"""On a CUDA device: all stages on one, in threads. Skipped, and said so, where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.runtime.pipeline import Pipeline
from penstock.schedule.families import FAMILIES
from tests.runtime import plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_on_the_device_equals_plain_pytorch_there(family):
    net, other = plain.model(8), plain.model(8).cuda()
    x, y = plain.batch(0, 16)
    losses, _ = plain.step(other, nn.functional.mse_loss, x.cuda(), y.cuda(), 8)
    with Pipeline(
        net, nn.functional.mse_loss, microbatches=8, ranks=4, schedule=family, device="cuda"
    ) as pipe:
        result = pipe.step(x, y)
        assert torch.allclose(result.losses.cpu(), losses.cpu(), rtol=1e-6)
        for (name, ours), theirs in zip(pipe.named_parameters(), other.parameters(), strict=True):
            assert ours.is_cuda
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7), name
        assert pipe.clip_grad_norm_(0.1).item() == pytest.approx(
            nn.utils.clip_grad_norm_(other.parameters(), 0.1).item(), rel=1e-5
        )
