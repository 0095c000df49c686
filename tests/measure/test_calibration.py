from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from penstock.base import host
from penstock.measure.busy_ranks import measure_cluster
from penstock.measure.calibration import calibrate, profile_layers
from penstock.plan.cluster import Cluster
from penstock.plan.prediction import predict
from penstock.profile.measured import Effort, measure_layers
from penstock.profile.model_profile import Profile
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss
from tests.support import hf_models
from tests.support.lanes import exhaustive

CONFIG = ModelConfig(vocabulary=96, width=32, layers=4, heads=4, kv_heads=2, hidden=64)
TOKENS = torch.zeros(2, 8, dtype=torch.int64)


def calibrated(rank: int = 0, dp: int = 1) -> tuple[Profile, Cluster]:
    options = {"target": TOKENS, "loss_fn": next_token_loss, "effort": Effort(0.1, 1), "microbatches": (2,)}
    profile = measure_layers(layers(CONFIG), TOKENS, **options)
    cluster = measure_cluster(2, dp=dp, rounds=3)
    given = (profile, cluster, partial(layers, CONFIG), next_token_loss, TOKENS, TOKENS)
    return calibrate(*given, rows=2, ranks=2, steps=2), cluster


@pytest.mark.slow
def test_a_calibrated_profile_and_the_measured_cluster_give_a_prediction():
    profile, cluster = calibrated()
    assert (cluster.devices, cluster.dtype) == (2, "fp32")
    limits = host.memory()
    assert limits is None or cluster.devices * cluster.device.memory <= limits.total  # the ranks share it
    assert cluster.node.latency > 0
    assert cluster.op_overhead > 0
    assert cluster.step_overhead > 0
    prediction = predict(profile, cluster, "pp=2,microbatch=2,schedule=1f1b", sequence=8, batch=8)
    assert profile.runtime is not None
    assert prediction.fits
    assert 1e-6 < prediction.step_seconds < 60


@pytest.mark.slow
def test_processes_measure_together(processes: LocalProcesses):
    (_, first), (_, second) = processes.run(2, calibrated, 2)
    assert first.node.reduce_bandwidth is not None
    measured = [(cluster.node, cluster.op_overhead, cluster.step_overhead) for cluster in (first, second)]
    assert measured[0] == measured[1]


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
