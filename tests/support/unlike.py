"""Clusters of unlike devices with round numbers, and a model whose blocks take a time that depends on the device."""

from __future__ import annotations

from typing import Any

from penstock.plan.cluster import Between, Cluster, Device, GroupedCluster, joined
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_profile import Profile, ProfiledLayer

SEQUENCE = 32


def profile_of(blocks: int, embedding: float = 0.0, head: float = 0.0) -> Profile:
    """A model whose blocks take 1 TFLOP each for F, I and W; its embedding and head, if any, so many TFLOPs.

    A layer has 10 parameters, keeps 100 bytes for its backward, and hands on 10.
    """
    flops = {"embedding": embedding, "block": 1.0, "head": head}
    kinds = []
    for each in flops.values():
        work = (DeviceWork("matmul", each * 1e12),)
        cost = LayerCost(
            forward=work, input_grad=work, weight_grad=work, model_flops=each * 1e12, parameters=10,
            saved_bytes=100, selective_bytes=100, input_bytes=10, output_bytes=10,
        )  # fmt: skip
        kinds.append(ProfiledLayer(((1, cost),)))
    layers: list[Any] = [(f"blocks.{n}", "block", 1) for n in range(blocks)]
    layers = [("embedding", "embedding", 0)] * bool(embedding) + layers + [("head", "head", 2)] * bool(head)
    return Profile(
        name="flops", source="traced", shape=None, sequence=SEQUENCE, dtype="fp32", kinds=tuple(kinds),
        layers=tuple(layers),
    )  # fmt: skip


def group(name: str, speed: float, memory: float = 1e6, **values: Any) -> Cluster:
    """A device of so many TFLOP/s and bytes of memory, whose links take no time."""
    device = Device(memory=memory, reserve=0.0, matmul={"fp32": speed * 1e12}, memory_bandwidth=1e9)
    return Cluster(name=name, device=device, dtype="fp32", **values)


def unlike(*groups: Cluster, **between: Any) -> GroupedCluster:
    cluster = joined(groups, Between(**between))
    assert isinstance(cluster, GroupedCluster)
    return cluster
