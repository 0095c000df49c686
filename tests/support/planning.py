"""A model and a cluster with round numbers, for tests of planning."""

from __future__ import annotations

from typing import Any

from penstock.plan.cluster import Cluster, Device, LinkSpeed
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_profile import Profile, ProfiledLayer
from penstock.profile.model_shape import ModelShape

SMALL = ModelShape(
    name="small", layers=16, hidden=64, heads=8, kv_heads=4, head_size=8, ffn=128, vocabulary=512
)
DEEPSEEK = ModelShape(
    name="deepseek", layers=3, hidden=64, heads=4, kv_heads=4, head_size=24, ffn=160, vocabulary=100, query_rank=32,
    kv_rank=16, rotary_size=8, value_size=16, experts=8, experts_per_token=2, expert_ffn=48, shared_ffn=40, dense_layers=1,
)  # fmt: skip
MIXTRAL = ModelShape(
    name="mixtral", layers=2, hidden=64, heads=8, kv_heads=2, head_size=8, ffn=224, vocabulary=100, experts=8,
    experts_per_token=2, expert_ffn=224,
)  # fmt: skip
SEQUENCE = 32


def seconds(number: float) -> tuple[DeviceWork, ...]:
    return (DeviceWork("seconds", number),)


def timed_profile(blocks: int = 4, **values: Any) -> Profile:
    """A model whose blocks take 1 s each for F, I and W with one sample, keep 100 bytes and have 10 parameters."""
    cost = LayerCost(
        forward=seconds(1.0), input_grad=seconds(1.0), weight_grad=seconds(1.0),
        saved_bytes=100, selective_bytes=100, waiting_bytes=20, input_bytes=10, output_bytes=10,
        parameters=10, model_flops=1e12,
    )  # fmt: skip
    layers = tuple((f"blocks.{n}", "block", 0) for n in range(blocks))
    return Profile(
        name="timed", source="measured", shape=None, sequence=SEQUENCE, dtype="fp32",
        kinds=(ProfiledLayer(((1, cost),)),), layers=layers, **values,
    )  # fmt: skip


def round_cluster(**values: Any) -> Cluster:
    """Sixteen devices of 1 TFLOP/s and 1 GB/s, with 1 MB of memory, and links that take no time."""
    device = Device(memory=1e6, matmul={"fp32": 1e12}, memory_bandwidth=1e9, optimizer_bandwidth=320.0)
    given = {"ranks_per_node": 16, "nodes": 1, "dtype": "fp32", **values}
    return Cluster(name="round", device=device, **given)


def slow_links(**values: Any) -> Cluster:
    """The same on nodes of two, with links that matter."""
    links = {"node": LinkSpeed(0.25, 40.0), "network": LinkSpeed(0.5, 20.0, 10.0)}
    return round_cluster(**{"ranks_per_node": 2, "nodes": 8, **links, **values})
