from __future__ import annotations

from functools import partial

import pytest
import torch
from bench.calibration import calibrate

from penstock.base import host
from penstock.measure.busy_ranks import measure_cluster
from penstock.plan.cluster import Cluster
from penstock.plan.prediction import predict
from penstock.profile.measured import Effort, measure_layers
from penstock.profile.model_profile import Profile
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

CONFIG = ModelConfig(vocabulary=96, width=32, layers=4, heads=4, kv_heads=2, hidden=64)
TOKENS = torch.zeros(2, 8, dtype=torch.int64)


def calibrated(rank: int = 0, dp: int = 1) -> tuple[Profile, Cluster]:
    options = {"target": TOKENS, "loss_fn": next_token_loss, "effort": Effort(0.1, 1), "microbatches": (2,)}
    profile = measure_layers(layers(CONFIG), TOKENS, **options)
    cluster = measure_cluster(2, dp=dp, rounds=3)
    given = (profile, cluster, partial(layers, CONFIG), next_token_loss, TOKENS, TOKENS)
    return calibrate(*given, rows=2, ranks=2, steps=2), cluster


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_processes_measure_together(processes: LocalProcesses):
    (_, first), (_, second) = processes.run(2, calibrated, 2)
    assert first.node.reduce_bandwidth is not None
    measured = [(cluster.node, cluster.op_overhead, cluster.step_overhead) for cluster in (first, second)]
    assert measured[0] == measured[1]
