from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from penstock.base.errors import SplitError
from penstock.plan.cluster import Cluster, Device
from penstock.plan.prediction import predict
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.measured import Effort, measure_layers
from penstock.profile.model_profile import Profile, ProfiledLayer
from penstock.profile.traced import trace_layers
from penstock.runtime.model.measured_split import blocks_by_cost
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss
from tests.support.lanes import slow

CONFIG = ModelConfig(vocabulary=48, width=16, layers=4, heads=4, kv_heads=2, hidden=32)
TOKENS = torch.zeros(2, 16, dtype=torch.int64)
SHORT = Effort(seconds=0.02, rounds=1)
CLUSTER = Cluster(
    name="here", ranks_per_node=4, dtype="fp32",
    device=Device(memory=1e12, matmul={"fp32": 1e12}, memory_bandwidth=1e10),
)  # fmt: skip


def measured(**options: Any) -> Profile:
    given = {"target": TOKENS, "loss_fn": next_token_loss, "effort": SHORT, "microbatches": (2,), **options}
    return measure_layers(layers(CONFIG), TOKENS, **given)


@pytest.mark.parametrize("ranks", [2, *slow(1)])
def test_every_half_of_every_kind_has_seconds(ranks: int):
    profile = measured(ranks=ranks, name="small")
    traced = trace_layers(layers(CONFIG), TOKENS, target=TOKENS, loss_fn=next_token_loss, microbatches=(2,))
    assert (profile.source, profile.name, profile.machine["ranks"]) == ("measured", "small", ranks)
    assert profile.layers == traced.layers
    assert profile.op_overhead > 0
    for kind, other in zip(profile.kinds, traced.kinds, strict=True):
        (_, cost), (_, expected) = kind.points[0], other.points[0]
        assert {work.unit for work in (*cost.forward, *cost.backward, *cost.input_grad)} == {"seconds"}
        assert (cost.saved_bytes, cost.model_flops) == (expected.saved_bytes, expected.model_flops)
        assert cost.waiting_bytes > 0
    prediction = predict(profile, CLUSTER, "pp=2,microbatch=2,schedule=zb-h1", sequence=16, batch=8)
    assert prediction.step_seconds > 0
    assert prediction.costs is not None
    assert prediction.costs.counts == (2, 2)


def measured_together(rank: int) -> Profile:
    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * 2
        dist.all_gather_object(values, value)
        return values

    return measured(exchange=exchange)


def test_processes_that_measure_together_get_one_profile(processes):
    one, other = processes.run(2, measured_together)
    assert one == other


class Fails(nn.Module):
    """A layer that runs once, when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.index is None:
            raise RuntimeError("not twice")
        return x * self.weight


def test_an_error_in_one_of_the_threads_is_raised():
    with pytest.raises(RuntimeError, match="not twice"):
        measure_layers(nn.Sequential(Fails()), torch.zeros(2, 3), ranks=2, effort=SHORT)


def costly(*seconds: float) -> Profile:
    kinds = [ProfiledLayer(((1, LayerCost(forward=(DeviceWork("seconds", s),))),)) for s in seconds]
    roles = ["embedding", *["block"] * (len(seconds) - 2), "head"]
    entries = tuple((str(n), role, n) for n, role in enumerate(roles))
    return Profile(name="m", source="measured", kinds=tuple(kinds), layers=entries)


def test_blocks_are_split_by_cost_with_embedding_and_head():
    assert blocks_by_cost(costly(0, 1, 1, 1, 1, 0), 2, 1) == (2, 2)
    assert blocks_by_cost(costly(0, 1, 1, 1, 1, 3), 2, 1) == (3, 1)
    assert blocks_by_cost(costly(2, 1, 1, 1, 1, 0), 2, 1) == (1, 3)
    assert blocks_by_cost(costly(1, 1, 1, 1, 1, 1), 6, 2) == (0, 1, 1, 1, 1, 0)
    assert blocks_by_cost(costly(0, 1, 1, 1, 1, 0), 2, 1, [3, 1]) == (3, 1)
    with pytest.raises(SplitError, match="at most 6 stage"):
        blocks_by_cost(costly(1, 1, 1, 1, 1, 1), 7, 2)


def test_measuring_leaves_the_model_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure_layers(model, torch.zeros(4, 4), ranks=2, effort=SHORT)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_autocast_runs_the_layers_in_16_bits():
    seen: list[torch.dtype] = []

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            seen.append(y.dtype)
            return y

    profile = measure_layers(
        nn.Sequential(Noting()), torch.zeros(2, 4), ranks=2, effort=SHORT, autocast=torch.bfloat16
    )
    assert (profile.dtype, profile.autocast) == ("bf16", True)
    assert set(seen) == {torch.bfloat16}
