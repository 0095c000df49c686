from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.measure.profile_layers import profile_layers
from penstock.profile.measured import Effort
from penstock.runtime.pipeline import Pipeline
from tests.support import hf_models
from tests.support.lanes import exhaustive


class OwnForward(nn.Module):
    """A model with a forward of its own, which returns the loss if there is a target."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x, y=None):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if y is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "measure"),
    [
        ("own forward", True),
        *exhaustive(("own loss", True), ("own loss", False), ("own forward", False)),
        *exhaustive(("transformers", True), ("transformers", False)),
    ],
)
def test_every_model_that_a_pipeline_takes_is_profiled(kind: str, measure: bool):
    ids = torch.randint(31, (2, 6), generator=torch.Generator().manual_seed(0))
    loss_fn = None
    model: nn.Module = OwnForward()
    if kind == "own forward":
        loss_fn = plain_loss
    elif kind == "transformers":
        model = hf_models.model("llama", num_hidden_layers=2)
    with Pipeline(model, loss_fn, microbatches=2) as pipe:
        names = [layer.name for layer in pipe.layers]
        pipe.step(torch.cat([ids, ids]), torch.cat([ids, ids]))
    options = {"measure": measure, "effort": Effort(seconds=0.5), "microbatches": [2]}
    profile = profile_layers(model, ids, target=ids, loss_fn=loss_fn, **options)
    assert [name for name, *_ in profile.layers] == names
    assert profile.sequence == 6
    assert profile.name == type(model).__name__
    assert profile.parameters == sum(p.numel() for p in model.parameters())


def plain_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
